"""Stand-ins for an engine in situations that a real one does not produce on demand: full, slow, broken, dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from server.engine.served import Calibrated, Capabilities, Inspected
from steering import (
    Auto,
    Busy,
    Choice,
    Chunk,
    Fault,
    Histogram,
    Request,
    Result,
    Steer,
    TextBounds,
    in_place_of,
    next_prelude,
)  # fmt: skip
from steering.protocol import intervention, readout


class FakeCompletion:
    """Plays a script of strings (text), exceptions (raised) and events (waited for), then ends with one choice."""

    def __init__(self, script: Sequence[Any], diagnostics: dict[str, Any] | None = None):
        self.script = script
        self.prompt_tokens = 3
        self.prompt_end = ""
        self.max_tokens = 125
        self.cancelled = threading.Event()
        self.pieces = 0
        self.text = ""
        self.first_at: float | None = None
        self.cached_tokens = 0
        self.diagnostics = diagnostics
        self.choice: Choice | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for chunk in self._chunks(None) if chunk is not None)

    def whole(self) -> Iterator[Chunk]:
        return (chunk for chunk in self if chunk.choice is not None)

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        return self._chunks(resume)

    def _chunks(self, resume: Callable[[], object] | None) -> Iterator[Chunk | None]:
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, threading.Event):
                if resume is not None:
                    threading.Thread(target=self._wait, args=(item, resume), daemon=True).start()
                    while not item.is_set() and not self.cancelled.is_set():
                        yield None
                self._wait(item)
                if not item.is_set():
                    return
                continue
            self.text += item
            self.pieces += 1
            self.first_at = self.first_at or time.monotonic()
            yield Chunk(0, item)
        choice = Choice(0, self.text, (1,) * len(self.script), "stop", applied=None, diagnostics=self.diagnostics)
        self.choice = choice
        yield Chunk(0, "", (), choice)

    def _wait(self, event: threading.Event, then: Callable[[], object] = lambda: None) -> None:
        while not event.wait(0.02) and not self.cancelled.is_set():
            pass
        then()

    def text_of(self, index: int) -> str:
        return self.text if index == 0 else ""

    def generated(self, index: int) -> int:
        return self.pieces if index == 0 else 0

    def result(self) -> Result:
        if self.choice is None and not self.cancelled.is_set():
            list(self)
        if self.choice is None:
            raise Fault("The request was cancelled.")
        return Result((self.choice,), self.prompt_tokens, len(self.script))

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeTurn:
    """A turn of a fake engine, whose own methods tests replace."""

    engine: FakeEngine
    calibration: Calibrated | None

    def check(self) -> None:
        self.engine.check()

    def submit(self, request: Request) -> FakeCompletion:
        return self.engine.submit(request)

    def decide(self, request: Request, begun: Callable[[Any], object]) -> Request:
        return self.engine.decide(request, begun)


class FakeEngine:
    """An engine whose next completion, refusal and numbers are set by the test."""

    def __init__(self, *script: Any):
        self.capabilities = Capabilities(
            name="fake", fingerprint="f" * 32, layers=2, hidden_size=8, context_length=128, text=TextBounds(128, 2048, 1024),
            device="cpu", dtype="float32", generation_defaults={"temperature": 0.0},
            interventions=frozenset(intervention.REGISTRY), readouts=frozenset(readout.REGISTRY),
        )  # fmt: skip
        self.healthy = True
        self.refusal: Exception | None = None
        self.full = False
        self.numbers = {"running": 0, "waiting": 0, "slots": 2, "max_waiting": 2}
        self.script: tuple[Any, ...] = script or ("Hello", " world")
        self.requests: list[Request] = []
        self.group = ""
        self.groups: list[str] = []
        self.completions: list[FakeCompletion] = []
        self.stopped: float | None = None
        self.diagnostics: dict[str, Any] | None = None
        self.calibrated: Calibrated | None = None

    @contextmanager
    def turn(self, group: str = "") -> Iterator[FakeTurn]:
        self.group = group
        yield FakeTurn(self, self.calibrated)

    def check(self) -> None:
        if self.full:
            raise Busy(2, retry_after=1.0)

    def submit(self, request: Request) -> FakeCompletion:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.groups.append(self.group)
        self.completions.append(FakeCompletion(self.script, self.diagnostics))
        return self.completions[-1]

    def decide(self, request: Request, begun: Callable[[Any], object]) -> Request:
        prelude = next_prelude(request)
        return request if prelude is None else in_place_of(request, prelude)

    def inspect(self, request: Request) -> Inspected:
        if self.refusal is not None:
            raise self.refusal
        return Inspected(7, request.sampling.max_tokens or 20)

    def calibration(self) -> Calibrated | None:
        return self.calibrated

    def can(self, **capabilities: Any) -> None:
        """Change what it can do."""
        self.capabilities = replace(self.capabilities, **capabilities)

    def magnitudes(self) -> torch.Tensor:
        return torch.ones(self.capabilities.layers)

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        assert steer.vector.fingerprint == self.capabilities.fingerprint

    def check_auto(self, auto: Auto) -> None:
        self.check_steer(auto.stated("vision"))

    def stats(self) -> dict[str, float]:
        return dict(self.numbers)

    @property
    def bins(self) -> dict[str, Histogram]:
        return {}

    def start(self) -> None:
        self.healthy = True

    def stop(self, drain: float = 0.0) -> None:
        self.stopped = drain
        self.healthy = False


def checkpoint() -> Path:
    """Return the embedded model's folder."""
    return Path(__file__).parents[2] / "demo" / "checkpoint"
