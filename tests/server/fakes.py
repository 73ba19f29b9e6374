"""Stand-ins for an engine in situations that a real one does not produce on demand: full, slow, broken, dead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from steering import Choice, Chunk, Request, Result


class FakeCompletion:
    """Plays a script of strings (text), exceptions (raised) and events (waited for), then ends with one choice."""

    def __init__(self, script: Sequence[Any], diagnostics: dict[str, Any] | None = None):
        self.script = script
        self.prompt_tokens = 3
        self.cancelled = threading.Event()
        self.pieces = 0
        self.diagnostics = diagnostics

    def __iter__(self) -> Iterator[Chunk]:
        text = ""
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, threading.Event):
                while not item.wait(0.02):
                    if self.cancelled.is_set():
                        return
                continue
            text += item
            self.pieces += 1
            yield Chunk(0, item)
        self.choice = Choice(0, text, (1,) * len(self.script), "stop", applied=None, diagnostics=self.diagnostics)
        yield Chunk(0, "", (), self.choice)

    def generated(self, index: int) -> int:
        return self.pieces if index == 0 else 0

    def result(self) -> Result:
        return Result((self.choice,), self.prompt_tokens, len(self.script))

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """An engine whose next completion, refusal and numbers are set by the test."""

    def __init__(self, *script: Any):
        self.mllm = SimpleNamespace(
            name="fake", path=None, fingerprint="f" * 32, num_layers=2, hidden_size=8, device="cpu", dtype="torch.float32",
            image_size=None, generation_defaults={"temperature": 0.0}, longest_token=16,
        )  # fmt: skip
        self.max_length = 128
        self.healthy = True
        self.refusal: Exception | None = None
        self.numbers = {"running": 0, "waiting": 0, "slots": 2, "max_waiting": 2}
        self.script: tuple[Any, ...] = script or ("Hello", " world")
        self.requests: list[Request] = []
        self.completions: list[FakeCompletion] = []
        self.stopped: float | None = None
        self.diagnostics: dict[str, Any] | None = None

    @contextmanager
    def turn(self) -> Iterator[FakeEngine]:
        yield self

    def submit(self, request: Request) -> FakeCompletion:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.completions.append(FakeCompletion(self.script, self.diagnostics))
        return self.completions[-1]

    def stats(self) -> dict[str, float]:
        return dict(self.numbers)

    def stop(self, drain: float = 0.0) -> None:
        self.stopped = drain
        self.healthy = False


def checkpoint() -> Path:
    """The embedded model's folder."""
    return Path(__file__).parents[2] / "demo" / "checkpoint"
