"""The engine's side: what the worker asks for is done, and what it is to hear is sent.

Between two steps the thread that steps takes in what has come. What is light it does itself, because a thread beside it
would take the interpreter from each of its operations, which costs more than the work: a short text is prepared, an answer's
pieces are sent. What may take long, pictures, long texts, grammars and the readouts of a finished answer, other threads do.
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
"""Seconds in which requests are taken in between two steps that as many others wait for as there are slots, and that few
wait for: those who come together are better off in one step than in several."""
_THREADS = 4
_WAIT, _LAST_WAIT = 1.0, 0.02
"""Seconds that an engine without work waits at once, and where it is to stop."""


class Sending:
    """A completion whose chunks are sent as they come. `light` says that the thread that steps makes them."""

    def __init__(self, number: int, completion: ServedCompletion, light: bool, due: Callable[[Sending], object]):
        self.light = light
        self.completion = completion
        self.number = number
        self._due = due
        self._is_due = self._began = False
        self._told: Counter[int] = Counter()  # log-probabilities of tokens, by choice
        self._chunks = completion.paused(self._news)

    def pending(self, out: list[Any]) -> bool:
        """Put what there is to say into a message; whether that was the last of it."""
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
    """Steps an engine for the worker at the other end of a link, until it is stopped. `alone` is called where the worker is
    gone, so that there is nobody to serve."""

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
        """Send what the last step has brought, take in what has come; without work, wait for some."""
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
        """Within a step, send first tokens and take in what has come; whether anything has that is to be answered."""
        self.flush()
        came = self._take_in(TAKEN)
        self.flush()
        return came

    def _take_in(self, seconds: float) -> bool:
        """Take what has come, for so long at most; whether anything has that is to be answered."""
        came, until = False, time.monotonic() + seconds
        with suppress(Empty):
            while time.monotonic() < until:
                message = self._inbox.get_nowait()
                came |= message is None or message[0] == "submit"
                self._take(message)
        return came

    def flush(self) -> None:
        """Send what there is to say, and have the other threads say what takes long to put."""
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
        if message is None:  # there is work
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
            light = light and not request.sampling.logprobs  # what is told with alternatives is no light matter
            sending = self._running[number] = Sending(number, completion, light, self._noted)
            out.append(["done", number, [completion.prompt_tokens, completion.max_tokens]])
            self._noted(sending)  # there may be something already
        except Exception as error:
            out.append(["refused", number, told(error)])

    def _cancel(self, number: int, choices: int) -> None:
        """End what runs, and say how far it has come."""
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
        """Take what comes; what asks only how things stand is answered here, and what takes long to prepare begun, however
        long a step takes."""
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
        self._inbox.put(None)  # there is work

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
        self._pump.run(said.set)  # behind the last answers
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
        """Have the worker hear something; where a part is nothing that can be sent, such as what a readout of somebody else
        has said, it hears that of this part."""
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
    """Bytes of memory that this process has; none where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def _carried(choice: Choice, told: int = 0) -> Choice:
    """A choice with that of what was measured which the worker needs, the states that later answers are compared with; and
    without log-probabilities where so many were told with its pieces, which are all of them."""
    measured = {name: one for name, one in choice.measured.items() if isinstance(one, Residual)}
    logprobs = () if choice.logprobs and told == len(choice.logprobs) else choice.logprobs
    baseline = choice.baseline and _carried(choice.baseline)
    return replace(choice, measured=measured, logprobs=logprobs, baseline=baseline)


def load(link: Link, make: Callable[[Callable[[str, float | None], None]], LocalEngine]) -> LocalEngine | None:
    """The engine that is made, with which the worker is told what it needs to know of it; None, and told why, where none
    can be. `make` is given what hears how far it is."""

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
