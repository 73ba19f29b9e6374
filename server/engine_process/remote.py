"""The worker's side of the link: an engine in another process, as a `server.engine.served.ServedEngine`."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from server.engine.local import has_pictures, is_light
from server.engine.resources import prepared_at_once
from server.engine.served import Capabilities, EngineEnded, ServedCompletion
from server.engine_process.clock import StepClock
from server.engine_process.completion import RemoteCompletion
from server.engine_process.link import Link, raised
from server.engine_process.room import RemoteRoom
from steering import Auto, Bins, Busy, Fault, Request, Steer

log = logging.getLogger("helmsight")

GLANCE = 0.5
"""Seconds to wait for an answer that an older one can replace."""
LAST = 0.75
"""Seconds beyond the drain time for an engine to stop.

Then running answers are ended here, within the worker's own `STOP`.
"""
_GONE = "The engine's process has ended."
_STOPS = "The server is shutting down."


class RemoteTurn:
    """A `ServedTurn` that the other process learns of with its first request."""

    def __init__(self, engine: RemoteEngine, number: int, group: str):
        self.number, self.group = number, group
        self.known = False
        self._engine = engine

    def check(self) -> None:
        """Raise the engine's refusal, as far as it can be predicted here."""
        self._engine.check(self.group)

    def submit(self, request: Request) -> ServedCompletion:
        """Queue a request in the other process, with its prompt if that is read here."""
        self.known = True
        with self._engine.preparing(request):
            prompt = self._engine.read(request)
            if prompt is None:  # the other process is to read it
                return self._engine.submit(self, request)
        return self._engine.submit(self, request, prompt)

    def decide(self, request: Request, begun: Callable[[ServedCompletion], object]) -> Request:
        """Run the first prelude in the other process."""
        self.known = True
        return self._engine.decide(self, request, begun)


class RemoteEngine:
    """An engine behind a link to a `Host` that has sent its capabilities (`connected`).

    `died` is called if that process ends unasked.
    """

    def __init__(
        self, link: Link, clock: StepClock, able: Capabilities, magnitudes: torch.Tensor | None, stats: Mapping[str, float],
        max_step: float, died: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self.capabilities = able
        self._link = link
        self._clock = clock
        self._magnitudes = magnitudes
        self._stats, self._bins = dict(stats), dict[str, Bins]()
        self._max_step = max_step
        self._died = died
        self._numbers = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[Any]] = {}
        self._running: dict[int, RemoteCompletion] = {}
        self._room = RemoteRoom()
        self._stopping = self._gone = False
        self.read: Callable[[Request], Any] = lambda request: None
        """The reader of prompts in this process; it returns None for those that the other process reads."""
        self.read_stats: Callable[[], Mapping[str, float]] = dict
        """The counters of that reader."""
        self._pictures, self._texts = (threading.BoundedSemaphore(prepared_at_once()) for _ in range(2))

    def start(self) -> None:
        """Receive messages of the other process, which is already at work."""
        threading.Thread(target=self._receive, name="helmsight-link", daemon=True).start()

    @property
    def healthy(self) -> bool:
        """True if the process exists, accepts requests and is not stuck in a step."""
        return not self._gone and not self._stopping and self._clock.stepping <= self._max_step

    def stop(self, drain: float = 0.0) -> None:
        """Let running answers finish for `drain` seconds; then the other process is gone."""
        self._stopping = True
        asking = threading.Thread(target=self._ask_to_stop, args=(drain,), daemon=True)
        asking.start()  # if the other process hangs, even sending may block for ever
        asking.join(drain + LAST)
        self._fail(Fault(_STOPS))
        self._link.close()

    def _ask_to_stop(self, drain: float) -> None:
        with suppress(Fault):
            self._ask("call", "stop", [drain])

    @contextmanager
    def turn(self, group: str = "") -> Iterator[RemoteTurn]:
        """Hold a place in the other process's queue."""
        turn = RemoteTurn(self, next(self._numbers), group)
        try:
            yield turn
        finally:
            if turn.known:
                self.send("leave", turn.number)

    def check(self, group: str) -> None:
        """Raise Fault if the engine is stopped, Busy if the group's queue is full or was full moments ago.

        The other process makes every other refusal.
        """
        if self._stopping or self._gone:
            raise Fault(_STOPS)
        held = [one for one in list(self._running.values()) if one.group == group]
        waiting = int(sum(one.n for one in held) - self._stats["slots"])
        if waiting >= self._stats["max_waiting"] and waiting > 0:
            raise Busy(waiting, 1.0)
        self._room.check(group)

    def preparing(self, request: Request) -> AbstractContextManager[object]:
        """Return the lock to hold while images or long texts are sent, since both processes hold them then."""
        if is_light(request):
            return nullcontext()
        return self._pictures if has_pictures(request) else self._texts

    def submit(self, turn: RemoteTurn, request: Request, prompt: Any = None) -> RemoteCompletion:
        """Queue a request in a turn; raises whatever the other engine raises.

        `prompt` is the request's prompt if it was read here.
        """
        self._room.take(turn.group, request.n)
        number = next(self._numbers)
        completion = self._running[number] = RemoteCompletion(self.send, number, request.n, turn.group)
        try:
            found = self._ask(
                "submit", turn.number, turn.group, request, prompt, number=number, patience=self._max_step
            )
        except Exception as error:
            self._running.pop(number, None)
            if isinstance(error, Fault):  # the request may still be queued there
                self.send("cancel", number, 0)
            raise
        completion.prompt_tokens, completion.max_tokens = found
        return completion

    def decide(self, turn: RemoteTurn, request: Request, begun: Callable[[ServedCompletion], object]) -> Request:
        """Return the request as the other process decides it; `begun` receives a completion that cancels this."""
        number = next(self._numbers)
        begun(RemoteCompletion(self.send, number, 0, turn.group))
        found = self._ask("call", "decide", [turn.number, turn.group, request], number=number)
        return replace(request, interventions=found)

    def stats(self) -> Mapping[str, float]:
        """Return the engine's stats plus the local counters; the last known ones if it does not answer."""
        self._look()
        return {**self._stats, **{name: self._stats.get(name, 0) + count for name, count in self.read_stats().items()}}

    @property
    def bins(self) -> Mapping[str, Bins]:
        """The engine's histograms, as of the last call of `stats`, so that reading both sends one message."""
        if not self._bins:
            self._look()
        return self._bins

    def magnitudes(self) -> torch.Tensor:
        """Return the (layers,) mean |h|."""
        assert self._magnitudes is not None
        return self._magnitudes

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        """Check a vector in the other engine."""
        self._ask("ask", "check_steer", [steer, images])

    def check_auto(self, auto: Auto) -> None:
        """Check an automatic direction in the other engine."""
        self._ask("ask", "check_auto", [auto])

    # -- messages ----------------------------------------------------------------------------------------------------------

    def send(self, name: str, number: int, *rest: Any) -> None:
        """Send a message to the other process, if it exists."""
        with suppress(OSError):
            self._link.send([name, number, *rest])

    def _look(self) -> None:
        if not (self._gone or self._stopping):
            with suppress(Fault):
                self._stats, bins = self._ask("ask", "stats", [], patience=GLANCE)
                self._bins = {name: Bins(*of) for name, of in bins.items()}

    def _ask(self, name: str, *rest: Any, number: int | None = None, patience: float | None = None) -> Any:
        """Return the other process's answer and raise the errors it raises.

        Raises Fault if the process is gone or does not answer in time.
        """
        number = next(self._numbers) if number is None else number
        answer = self._waiting[number] = SimpleQueue()
        try:
            self._link.send([name, number, *rest])
            if self._gone:  # the process may have ended before this waiter was registered
                raise EngineEnded(_GONE)
            found = answer.get(timeout=patience)
        except OSError as error:
            raise EngineEnded(_GONE) from error
        except Empty as error:
            raise Fault("The engine's process does not answer.") from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(found, Exception):
            raise found
        return found

    def _receive(self) -> None:
        try:
            while True:
                for name, number, *rest in self._link.receive():
                    self._hear(name, number, rest)
        except EOFError:
            pass
        except Exception:
            log.exception("what the engine's process has sent cannot be read")
        self._gone = True
        self._fail(EngineEnded(_GONE))
        if not self._stopping:
            log.critical("the engine's process has ended by itself")
            self._died()

    def _fail(self, error: Fault) -> None:
        """End everything that waits for the other process."""
        for answer in list(self._waiting.values()):
            answer.put(error)
        for completion in list(self._running.values()):
            completion.fail(error)

    def _hear(self, name: str, number: int, rest: list[Any]) -> None:
        completion = self._running.get(number)
        if name in ("done", "refused"):
            found = raised(rest[0]) if name == "refused" else rest[0]
            if completion is not None:
                self._room.answered(completion.group, completion.n, found)
            answer = self._waiting.get(number)
            if answer is not None:
                answer.put(found)
        elif completion is not None:
            completion.hear(name, *rest)
            if completion.settled.is_set() and self._running.pop(number, None) is not None:
                self._room.ended(completion.n)


def connected(
    link: Link,
    clock: StepClock,
    tell: Callable[[str, float | None], object],
    max_step: float,
    died: Callable[[], object],
) -> RemoteEngine:
    """Wait until the engine at the other end has loaded, and return it; `tell` receives the progress.

    Raises whatever loading raises, and EngineEnded, after calling `died`, if the process ends instead.
    """
    while True:
        try:
            messages = link.receive()
        except EOFError as error:
            log.critical("the engine's process has ended by itself while it loaded")
            died()
            raise EngineEnded(_GONE) from error
        for name, _, *rest in messages:
            if name == "refused":
                raise raised(rest[0])
            if name == "told":
                tell(*rest)
            else:
                able, folder, magnitudes, stats = rest[0]
                able = replace(able, folder=None if folder is None else Path(folder))
                return RemoteEngine(link, clock, able, magnitudes, stats, max_step, died)
