"""Passes are timed by the device that runs them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from steering.core.price import PassClock, Price


class RecordedPrice(Price):
    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[float, float]] = []

    def learn(self, units: float, seconds: float) -> None:
        self.passes.append((units, seconds))


def test_a_processor_is_timed_by_the_host() -> None:
    clock, price = PassClock(torch.device("cpu")), RecordedPrice()
    start = clock.mark()
    time.sleep(0.02)
    clock.passed(price, 7, start)
    clock.settle()
    ((units, seconds),) = price.passes
    assert units == 7
    assert 0.02 <= seconds < 15


def test_a_gpu_is_asked_when_it_has_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretend GPU, which is slower than its host: its events are at these milliseconds of its own time."""
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing
            self.at = [5.0, 45.0, 45.0, 105.0][len(made)]
            self.ran = False
            made.append(self)

        def record(self, stream: object) -> None:
            assert stream == "stream of cuda:1"

        def query(self) -> bool:
            return self.ran

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock, price, picture = PassClock(torch.device("cuda:1")), RecordedPrice(), RecordedPrice()
    assert not clock.waits
    clock.passed(picture, 3, clock.mark())
    clock.passed(price, 440, clock.mark())
    made[1].ran = True
    clock.settle()
    assert picture.passes == [(3, pytest.approx(0.040))]
    assert price.passes == []
    made[3].ran = True
    clock.settle()
    assert price.passes == [(440, pytest.approx(0.060))]
