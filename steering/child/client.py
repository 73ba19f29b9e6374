"""The parent's side of the link: a client of an engine core in a child process."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from steering.child.clock import StepClock
from steering.child.facts import ModelFacts
from steering.child.link import Link
from steering.child.refusals import RefusalEstimate
from steering.errors import SHUTTING_DOWN, Busy, EngineEnded, Fault
from steering.front.client import Client
from steering.histogram import Histogram
from steering.messages.messages import Add, Output
from steering.model.mllm import MLLM

log = logging.getLogger(__name__)

GLANCE = 0.5
"""Seconds to wait for an answer that an older one can replace."""
LAST = 0.75
"""Seconds beyond the drain time for an engine to stop.

After them the parent ends running answers itself, within the `STOP` of the server's worker.
"""
_GONE = "The engine's process has ended."


class ChildClient(Client):
    """A client of the core behind a link to a `Host`; the model `mllm` has no weights.

    `died` is called if that process ends unasked. A step of more than `max_step` seconds counts as hung.
    """

    def __init__(
        self,
        mllm: MLLM,
        facts: ModelFacts,
        link: Link,
        clock: StepClock,
        stats: Mapping[str, float],
        max_step: float,
        died: Callable[[], object] = lambda: None,
    ):
        facts.complete(mllm)
        super().__init__(mllm, facts.limits)
        self._link = link
        self._clock = clock
        self._stats, self._bins = dict(stats), dict[str, Histogram]()
        self._max_step = max_step
        self._died = died
        self._questions = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[Any]] = {}
        self._room = RefusalEstimate()
        self._gone = False

    def start(self) -> None:
        """Receive messages of the other process, which is already at work."""
        threading.Thread(target=self._receive, name="helmsight-link", daemon=True).start()

    @property
    def healthy(self) -> bool:
        """True if the process exists, accepts requests and is not stuck in a step."""
        return not self._gone and not self._stopping and self._clock.stepping <= self._max_step

    @property
    def stepped(self) -> bool:
        return True

    def stats(self) -> Mapping[str, float]:
        """Return the engine's stats, or the last known ones, with those of this process's image cache added."""
        self._look()
        return {
            **self._stats,
            **{name: self._stats.get(name, 0) + count for name, count in self.mllm.seen.stats().items()},
        }

    @property
    def bins(self) -> Mapping[str, Histogram]:
        """The engine's histograms, as of the last call of `stats`, so that reading both sends one message."""
        if not self._bins:
            self._look()
        return self._bins

    def receive(self, outputs: Iterable[Output]) -> None:
        outputs = list(outputs)
        super().receive(outputs)
        if ended := sum(output.ended is not None for output in outputs):
            self._room.ended(ended)

    # -- the core ----------------------------------------------------------------------------------------------------------

    def _add(self, request: Add) -> None:
        if not request.admitted:
            self._room.take(request.group, request.answers)
        answer: object = None
        try:
            answer = self._ask("add", request, number=request.number, patience=self._max_step)
        except Exception as error:
            answer = error
            if isinstance(error, Fault):  # the request may still be queued there
                self._send("abort", request.number)
            raise
        finally:
            if not request.admitted:
                self._room.answered(request.group, request.answers, answer)

    def _abort(self, number: int) -> None:
        self._send("abort", number)

    def _put_out_whole(self, number: int) -> None:
        self._send("whole", number)

    def _check(self, answers: int, group: str) -> None:
        """Raise Busy if the group's queue is full or was full moments ago; the other process makes every other refusal."""
        completions = [completion for completion in list(self._running.values()) if completion.group == group]
        waiting = int(sum(completion.answers for completion in completions) - self._stats["slots"])
        if waiting >= self._stats["max_waiting"] and waiting > 0:
            raise Busy(waiting, 1.0)
        self._room.check(group)

    def _close(self) -> None:
        asking = threading.Thread(target=self._ask_to_stop, daemon=True)
        asking.start()  # if the other process hangs, even sending may block for ever
        asking.join(LAST)
        self._fail(Fault(SHUTTING_DOWN))
        self._link.close()

    @property
    def _is_dead(self) -> bool:
        return self._gone

    # -- messages ----------------------------------------------------------------------------------------------------------

    def _ask_to_stop(self) -> None:
        with suppress(Fault):
            self._ask("stop")

    def _send(self, name: str, number: int, *payload: Any) -> None:
        """Send a message to the other process, if it exists."""
        with suppress(OSError):
            self._link.send([name, number, *payload])

    def _look(self) -> None:
        if not (self._gone or self._stopping):
            with suppress(Fault):
                self._stats, bins = self._ask("stats", patience=GLANCE)
                self._bins = {name: Histogram(*of) for name, of in bins.items()}

    def _ask(self, name: str, *payload: Any, number: int | None = None, patience: float | None = None) -> Any:
        """Return the other process's reply and raise the errors it raises.

        Raises Fault if the process is gone or does not answer in time.
        """
        number = -next(self._questions) if number is None else number
        reply = self._waiting[number] = SimpleQueue()
        try:
            self._link.send([name, number, *payload])
            if self._gone:  # the process may have ended before this waiter was registered
                raise EngineEnded(_GONE)
            answer = reply.get(timeout=patience)
        except OSError as error:
            raise EngineEnded(_GONE) from error
        except Empty as error:
            raise Fault("The engine's process does not answer.") from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive(self) -> None:
        try:
            while True:
                for name, number, *payload in self._link.receive():
                    self._hear(name, number, payload)
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
        for reply in list(self._waiting.values()):
            reply.put(error)
        self.fail(error)

    def _hear(self, name: str, number: int, payload: list[Any]) -> None:
        if name == "tokens":
            self.receive(Output(request, answer, [token]) for request, answer, token in zip(*payload, strict=True))
        elif name == "output":
            self.receive(payload)
        elif (reply := self._waiting.get(number)) is not None:
            reply.put(payload[0])


def wait_for(
    link: Link, tell: Callable[[str, float | None], object], died: Callable[[], object]
) -> tuple[ModelFacts, Mapping[str, float]]:
    """Wait until the engine at the other end has loaded, and return its facts and its stats; `tell` receives the progress.

    Raises whatever loading raises, and EngineEnded, after calling `died`, if the process ends instead.
    """
    while True:
        try:
            messages = link.receive()
        except EOFError as error:
            log.critical("the engine's process has ended by itself while it loaded")
            died()
            raise EngineEnded(_GONE) from error
        for name, _, *payload in messages:
            if name == "refused":
                raise payload[0]
            if name == "told":
                tell(*payload)
            else:
                facts, stats = payload[0]
                return facts, stats
