"""The child's side of the link: it adds the parent's requests to the core, steps it, and sends its outputs.

Between two steps the stepping thread handles new messages. It does light work itself, since a second thread would take the
interpreter from each of its operations, which costs more than the work. Other threads do what may take long: they compile
grammars, and send measurements and log-probabilities.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from steering.child.clock import StepClock
from steering.child.facts import ModelFacts
from steering.child.link import Link
from steering.errors import Fault
from steering.front.engine import Engine
from steering.front.magnitudes import magnitudes
from steering.interventions.steer import Steering
from steering.messages.messages import Add, Output

log = logging.getLogger(__name__)

TAKEN, MOST_TAKEN = 0.003, 0.012
"""Seconds for which messages are taken in between two steps: with all slots busy, and with few.

Requests that arrive together are better batched into one step than spread over several.
"""
_THREADS = 4
_WAIT, _LAST_WAIT = 1.0, 0.02
"""Seconds that an idle engine waits at a time, and while it is stopping."""


class Host:
    """Steps an engine for the client at the other end of a link until it is stopped.

    `alone` is called if the parent process is gone.
    """

    def __init__(self, link: Link, engine: Engine, clock: StepClock, alone: Callable[[], object]):
        self._alone = alone
        self._link = link
        self._engine, self._core = engine, engine.core
        self._clock = clock
        self._inbox: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._replies: list[list[Any]] = []
        self._pool = ThreadPoolExecutor(_THREADS, "helmsight-grammars")
        self._adding: dict[int, bool] = {}  # requests whose grammar is compiled, and whether each is still wanted
        self._sender = ThreadPoolExecutor(1, "helmsight-answers")
        self._stopping = False

    def run(self) -> None:
        """Serve until the engine is stopped."""
        threading.Thread(target=self._read, name="helmsight-link", daemon=True).start()
        self._engine.run(self._heed, self.deliver, self._meanwhile)
        self._flush()

    # -- the thread that steps ---------------------------------------------------------------------------------------------

    def _heed(self, busy: bool) -> None:
        """Take in new messages; wait for some if idle."""
        self._clock.rest()
        running = len(self._core.scheduler.running)
        most = min(MOST_TAKEN, TAKEN * max(1.0, self._core.slots / max(1, running)))
        if not busy:
            with suppress(Empty):
                self._take(self._inbox.get(timeout=_LAST_WAIT if self._stopping else _WAIT))
        self._take_in(most)
        self._flush()
        self._clock.step()

    def _meanwhile(self) -> bool:
        """Send first tokens and take in new messages within a step; return True if any is a request."""
        self.deliver(self._core.take_outputs())
        has_request = self._take_in(TAKEN)
        self._flush()
        return has_request

    def _take_in(self, seconds: float) -> bool:
        """Take in messages for at most `seconds`; return True if any is a request."""
        has_request, until = False, time.monotonic() + seconds
        with suppress(Empty):
            while time.monotonic() < until:
                message = self._inbox.get_nowait()
                has_request |= message is None or message[0] == "add"
                self._take(message)
        return has_request

    def _take(self, message: list[Any] | None) -> None:
        if message is None:  # only wakes the idle engine
            return
        name, number, *payload = message
        match name:
            case "add":
                self._replies.append(self._added(number, *payload))
            case "whole":
                self._core.put_out_whole(number)
            case "abort":
                if number in self._adding:
                    self._adding[number] = False
                self._core.abort(number)
            case "stop":
                self._stopping = True
                self._pool.submit(self._stop, number)

    def deliver(self, outputs: list[Output]) -> None:
        """Send outputs; another thread sends those that are expensive to encode, such as measurements."""
        single: list[Output] = []
        others: list[list[Any]] = []
        for output in outputs:
            if output.logprobs is not None or (output.ended is not None and output.ended.taken):
                self._sender.submit(self._send, [["output", output.request, output]])
            elif output.ended is None and len(output.tokens) == 1 and not output.first_at:
                single.append(output)
            else:
                others.append(["output", output.request, output])
        if single:
            tokens = [output.tokens[0] for output in single]
            others.append(
                ["tokens", 0, [output.request for output in single], [output.answer for output in single], tokens]
            )
        self._send(others)

    def _flush(self) -> None:
        replies, self._replies = self._replies, []
        self._send(replies)

    # -- other threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Receive messages for as long as the link is open, however long a step takes.

        Requests for stats are answered here, and the pool compiles grammars.
        """
        try:
            while True:
                message = self._link.receive()
                name, number, *payload = message
                if name == "stats":
                    self._send([["done", number, self._stats()]])
                elif name == "add" and payload[0].grammar is not None:
                    self._adding[number] = True
                    self._pool.submit(self._add_aside, number, *payload)
                else:
                    self._inbox.put(message)
        except EOFError:
            pass
        except Exception:
            log.exception("what the worker has sent cannot be read")
        self._alone()

    def _add_aside(self, number: int, request: Add) -> None:
        self._send([self._added(number, request)])
        if not self._adding.pop(number):
            self._core.abort(number)
        self._inbox.put(None)  # wakes the idle engine

    def _added(self, number: int, request: Add) -> list[Any]:
        """Add a request to the core and return the reply."""
        try:
            self._core.add(request)
        except Exception as error:
            return ["refused", number, error]
        return ["done", number, None]

    def _stats(self) -> list[Any]:
        bins = {
            name: [histogram.bounds, histogram.counts, histogram.total] for name, histogram in self._engine.bins.items()
        }
        return [{**self._engine.stats(), **_memory()}, bins]

    def _stop(self, number: int) -> None:
        self._engine.stop()
        with suppress(TimeoutError):
            self._sender.submit(lambda: None).result(_WAIT)  # it runs after the last outputs
        self._send([["done", number, None]])

    def _send(self, messages: list[list[Any]]) -> None:
        """Send messages to the parent.

        A message that cannot be sent, as with a measurement of a third-party recorder, is replaced by an error.
        """
        if not messages:
            return
        try:
            self._link.send(messages)
        except OSError:
            self._alone()
        except Exception as error:
            if len(messages) > 1:
                for message in messages:
                    self._send([message])
                return
            log.error("an answer cannot be sent to the worker", exc_info=error)
            fault = Fault(f"The answer cannot be sent: {error}")
            name, number, *payload = messages[0]
            if name == "output" and payload[0].ended is not None:
                ended = replace(payload[0].ended, error=fault, taken={})
                self._send([["output", number, replace(payload[0], ended=ended)]])
            elif name == "done":
                self._send([["refused", number, fault]])


def _memory() -> dict[str, float]:
    """Return the resident bytes of this process; empty if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def load(link: Link, make: Callable[[Callable[[str, float | None], None]], Engine]) -> Engine | None:
    """Return the engine of `make` and send its facts to the parent; None if it cannot be made, which is sent too.

    `make` receives a callback for its progress.
    """

    def tell(stage: str, share: float | None) -> None:
        link.send([["told", 0, stage, share]])

    try:
        engine = make(tell)
        steers = Steering.name() in engine.interventions
        if steers:
            tell("measuring its magnitudes", None)
        facts = ModelFacts.of(engine, magnitudes(engine) if steers else None)
    except BaseException as error:  # a panic of a native library is no Exception
        link.send([["refused", 0, error]])
        return None
    link.send([["done", 0, [facts, engine.stats()]]])
    return engine
