"""The engine's side of the link: it executes the worker's messages and sends the results.

Between two steps the stepping thread handles new messages. It does light work itself, since a second thread would take the
interpreter from each of its operations, which costs more than the work: it prepares short texts and sends chunks of answers.
Other threads do what may take long: images, long texts, grammars and the readouts of finished answers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from server.engine.local import LocalEngine, LocalTurn, is_light
from server.engine.resources import Pump
from server.engine.served import ServedCompletion
from server.engine_process.clock import StepClock
from server.engine_process.link import Link, told
from steering import Auto, Choice, Chunk, Fault, Request
from steering.recorders.residual import Residual

log = logging.getLogger("helmsight")

TAKEN, MOST_TAKEN = 0.003, 0.012
"""Seconds for which messages are taken in between two steps: with all slots busy, and with few.

Requests that arrive together are better batched into one step than spread over several.
"""
_THREADS = 4
_WAIT, _LAST_WAIT = 1.0, 0.02
"""Seconds that an idle engine waits at a time, and while it is stopping."""


class Sending:
    """A completion whose chunks are sent as they arrive; `light` means that the stepping thread sends them."""

    def __init__(self, number: int, completion: ServedCompletion, light: bool, due: Callable[[Sending], object]):
        self.light = light
        self.completion = completion
        self.number = number
        self._due = due
        self._is_due = self._began = False
        self._told: Counter[int] = Counter()  # log-probabilities sent so far, by choice
        self._chunks = completion.paused(self._news)

    def pending(self, out: list[Any]) -> bool:
        """Append pending messages to `out` and return whether the completion has ended."""
        self._is_due = False
        held: Chunk | None = None
        try:
            for chunk in self._chunks:
                if held is not None:
                    self._say(held, out)
                if chunk is None:
                    return False
                held = chunk
            if held is not None:  # the last one, unless it was cancelled
                self._say(held, out, self.completion.result().cached_tokens)
        except Exception as error:
            out.append(["failed", self.number, told(error)])
        return True

    def _say(self, chunk: Chunk, out: list[Any], cached: int = 0) -> None:
        if not self._began:
            self._began = True
            out.append(["began", self.number, self.completion.first_at])
        if chunk.choice is None and not chunk.logprobs and not chunk.calls:
            out.append(["text", self.number, chunk.index, chunk.text])
        else:
            self._told[chunk.index] += len(chunk.logprobs)
            carried = chunk.choice and _carried(chunk.choice, self._told[chunk.index])
            out.append(["chunk", self.number, replace(chunk, choice=carried), cached])

    def _news(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._due(self)


class Host:
    """Steps an engine for the worker at the other end of a link until it is stopped.

    `alone` is called if the worker is gone, so that nobody is left to serve.
    """

    def __init__(self, link: Link, engine: LocalEngine, clock: StepClock, alone: Callable[[], object]):
        self._alone = alone
        self._link = link
        self._engine = engine
        self._clock = clock
        self._slots = engine.stats()["slots"]
        self._inbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._running: dict[int, Sending] = {}
        self._deciding: dict[int, list[ServedCompletion] | None] = {}
        self._turns: dict[int, tuple[ExitStack, LocalTurn]] = {}
        self._due: deque[Sending] = deque()
        self._out: list[Any] = []
        self._pool = ThreadPoolExecutor(_THREADS, "helmsight-prepare")
        self._pump = Pump("helmsight-answers")
        self._stopping = False

    def run(self) -> None:
        """Serve until the engine is stopped."""
        threading.Thread(target=self._read, name="helmsight-link", daemon=True).start()
        self._engine.run(self._heed, self._meanwhile)
        self.flush()

    # -- the thread that steps ---------------------------------------------------------------------------------------------

    def _heed(self, busy: bool) -> None:
        """Send the results of the last step and take in new messages; wait for some if idle."""
        self._clock.rest()
        self.flush()
        taken = min(MOST_TAKEN, TAKEN * max(1.0, self._slots / max(1, len(self._running))))
        if not busy:
            with suppress(Empty):
                self._take(self._inbox.get(timeout=_LAST_WAIT if self._stopping else _WAIT))
        self._take_in(taken)
        self.flush()
        self._clock.step()

    def _meanwhile(self) -> bool:
        """Send first tokens and take in new messages within a step; return whether any is a request."""
        self.flush()
        came = self._take_in(TAKEN)
        self.flush()
        return came

    def _take_in(self, seconds: float) -> bool:
        """Take in messages for at most `seconds`; return whether any is a request."""
        came, until = False, time.monotonic() + seconds
        with suppress(Empty):
            while time.monotonic() < until:
                message = self._inbox.get_nowait()
                came |= message is None or message[0] == "submit"
                self._take(message)
        return came

    def flush(self) -> None:
        """Send pending chunks, and have other threads send those that are expensive to build."""
        for _ in range(len(self._due)):
            sending = self._due.popleft()
            if not sending.light:
                self._pump.run(partial(self._say, sending))
            elif sending.pending(self._out):
                self._running.pop(sending.number, None)
        if self._out:
            out, self._out = self._out, []
            self._send(out)

    def _say(self, sending: Sending) -> None:
        out: list[Any] = []
        if sending.pending(out):
            self._running.pop(sending.number, None)
        self._send(out)

    def _take(self, message: list[Any] | None) -> None:
        if message is None:  # only wakes the idle engine
            return
        name, number, *rest = message
        match name:
            case "submit":
                self._submit(number, *rest, light=True, out=self._out)
            case "whole" if number in self._running:
                self._running[number].completion.whole()
            case "cancel":
                self._cancel(number, *rest)
            case "leave":
                stack, _ = self._turns.pop(number, (None, None))
                if stack is not None:
                    stack.close()
            case "call":
                method, args = rest
                self._stopping |= method == "stop"
                self._pool.submit(self._call, number, method, args)

    def _submit(
        self, number: int, turn: int, group: str, request: Request, prompt: Any, *, light: bool, out: list[Any]
    ) -> None:
        try:
            place = self._turn(turn, group)
            completion = place.submit(request) if prompt is None else place.submit_read(request, prompt)
            light = light and not request.sampling.logprobs  # log-probabilities are expensive to send
            sending = self._running[number] = Sending(number, completion, light, self._noted)
            out.append(["done", number, [completion.prompt_tokens, completion.max_tokens]])
            self._noted(sending)  # chunks may have arrived already
        except Exception as error:
            out.append(["refused", number, told(error)])

    def _cancel(self, number: int, choices: int) -> None:
        """Cancel a completion and report how far it has come."""
        if number in self._deciding:
            begun, self._deciding[number] = self._deciding[number], None
            for completion in begun or ():
                completion.cancel()
        sending = self._running.get(number)
        if sending is not None:
            completion = sending.completion
            completion.cancel()
            said = [[completion.generated(index), completion.said(index)] for index in range(choices)]
            self._out.append(["gone", number, completion.first_at, said])
            self._running.pop(number, None)

    def _noted(self, sending: Sending) -> None:
        self._due.append(sending)

    # -- other threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Receive messages for as long as the link is open, however long a step takes.

        Questions about the current state are answered here, and expensive preparation is handed to the pool.
        """
        try:
            while True:
                message = self._link.receive()
                if message[:1] == ["ask"]:
                    self._call(*message[1:])
                elif message[:1] == ["submit"] and not is_light(message[-2]):
                    self._pool.submit(self._prepare, *message[1:])
                else:
                    self._inbox.put(message)
        except EOFError:
            pass
        except Exception:
            log.exception("what the worker has sent cannot be read")
        self._alone()

    def _prepare(self, number: int, *asked: Any) -> None:
        out: list[Any] = []
        self._submit(number, *asked, light=False, out=out)
        self._send(out)
        self._inbox.put(None)  # wakes the idle engine

    def _call(self, number: int, method: str, args: Sequence[Any]) -> None:
        try:
            said = ["done", number, getattr(self, f"_answer_{method}")(number, *args)]
        except Exception as error:
            said = ["refused", number, told(error)]
        self._send([said])

    def _answer_stats(self, number: int) -> list[Any]:
        bins = {name: [one.bounds, one.counts, one.total] for name, one in self._engine.bins.items()}
        return [{**self._engine.stats(), **_memory()}, bins]

    def _answer_stop(self, number: int, drain: float) -> None:
        self._engine.stop(drain)
        said = threading.Event()
        self._pump.run(said.set)  # runs after the last answers
        said.wait(_WAIT)

    def _answer_check_steer(self, number: int, *args: Any) -> None:
        self._engine.check_steer(*args)

    def _answer_check_auto(self, number: int, auto: Auto) -> None:
        self._engine.check_auto(auto)

    def _answer_decide(self, number: int, turn: int, group: str, request: Request) -> Any:
        self._deciding[number] = []

        def begun(completion: ServedCompletion) -> None:
            self._inbox.put(None)
            running = self._deciding[number]
            if running is None:
                completion.cancel()
            else:
                running.append(completion)

        try:
            return self._turn(turn, group).decide(request, begun).interventions
        finally:
            del self._deciding[number]

    def _turn(self, number: int, group: str) -> LocalTurn:
        if number not in self._turns:
            stack = ExitStack()
            self._turns[number] = (stack, stack.enter_context(self._engine.turn(group)))
        return self._turns[number][1]

    def _send(self, message: list[Any]) -> None:
        """Send messages to the worker.

        If a part cannot be sent, such as the value of a third-party readout, the worker receives an error for that part.
        """
        if not message:
            return
        try:
            self._link.send(message)
        except OSError:
            self._alone()
        except Exception as error:
            name, number, *_ = message[0]
            if len(message) > 1:
                for part in message:
                    self._send([part])
            else:
                log.error("an answer cannot be sent to the worker", exc_info=error)
                fault = told(Fault(f"The answer cannot be sent: {error}"))
                self._send([["refused" if name == "done" else "failed", number, fault]])


def _memory() -> dict[str, float]:
    """Return the resident bytes of this process; empty if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def _carried(choice: Choice, told: int = 0) -> Choice:
    """Return a choice with those measurements only that the worker needs: the states that later answers are compared with.

    Its log-probabilities are left out if all `told` of them were sent with its chunks.
    """
    measured = {name: one for name, one in choice.measured.items() if isinstance(one, Residual)}
    logprobs = () if choice.logprobs and told == len(choice.logprobs) else choice.logprobs
    baseline = choice.baseline and _carried(choice.baseline)
    return replace(choice, measured=measured, logprobs=logprobs, baseline=baseline)


def load(link: Link, make: Callable[[Callable[[str, float | None], None]], LocalEngine]) -> LocalEngine | None:
    """Return the engine of `make` and send its capabilities to the worker; None if it cannot be made, which is sent too.

    `make` receives a callback for its progress.
    """

    def tell(stage: str, share: float | None) -> None:
        link.send([["told", 0, stage, share]])

    try:
        engine = make(tell)
        able = engine.capabilities
        steers = "steering" in able.interventions
        if steers:
            tell("measuring its magnitudes", None)
        magnitudes = engine.magnitudes() if steers else None
    except BaseException as error:  # a panic of a native library is no Exception
        link.send([["refused", 0, told(error)]])
        return None
    folder = None if able.folder is None else str(able.folder)
    link.send([["done", 0, [replace(able, folder=None), folder, magnitudes, dict(engine.stats())]]])
    return engine
