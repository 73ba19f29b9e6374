"""The price of a pass, learned from what passes took on the device that runs them, which the host does not wait for."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

WINDOW = 32
"""Passes that a price rests on, the last ones."""
APART = 0.25
"""Sizes of two passes tell the price of a unit where they differ by more than this share of the larger one."""
FLATTEST = 0.01
"""A unit costs at least this share of what a pass costs for each of its units: a price of zero would fit anything."""
NEAR = 8
"""Only passes that are at most so many others apart are compared: a machine changes meanwhile."""
SURE = 0.9
"""A step is to keep its bound in this share of cases, by the spread of what passes took."""
SHORTEST = 1e-7
"""Seconds of a pass, at least: clocks may stand still."""
WIDEST = 1.5
"""The spread is taken to be no wider: what took longer still was an outlier."""


class Price:
    """Estimates the seconds of a pass of n units as `fixed + each * n`.

    `each` is the median of the slopes between pairs of the last passes that differ in size, weighted by their distance
    (Theil 1950, Sen 1968), and `fixed` is the median of the rest. So a quarter of the passes may be outliers: pauses of
    the machine, compilation, graph capture. Passes of one size tell no slope; they scale both parts alike.
    The first pass of all, which warms up, counts only until there is a second one. `guess` is the share of a pass that is
    taken to be fixed while all were of one size.
    """

    def __init__(self, guess: float = 0.0):
        self.fixed = 0.0
        self.each = 0.0
        self.spread = 1.0
        """Times as long as estimated that a pass takes which is slower than most."""
        self.largest = 0.0
        """The largest size in the window."""
        self.usual = 0.0
        """The median size in the window."""
        self.measured = False
        """Whether passes of two sizes were ever seen."""
        self.count = 0
        self._guess = guess
        self._passes: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def learn(self, units: float, seconds: float) -> None:
        """Learn from one pass."""
        if self.count == 1:
            self._passes.clear()
        self.count += 1
        self._passes.append((units, max(seconds, SHORTEST)))
        if self.count < WINDOW // 2 or self.count % 4 == 0:
            self._fit()

    def of(self, units: float) -> float:
        """Estimate the seconds of a pass."""
        return self.fixed + self.each * units

    @property
    def worth(self) -> float:
        """The units that cost as much as the pass itself: smaller passes cost more than they bring."""
        return self.fixed / self.each if self.each else 0.0

    def _fit(self) -> None:
        units, seconds = np.array(self._passes).T
        self.largest, self.usual = float(units.max()), float(np.median(units))
        level = float(np.median(seconds))
        first, second = np.triu_indices(len(units), 1)
        distance = units[first] - units[second]
        telling = np.abs(distance) > APART * np.maximum(units[first], units[second])
        telling &= second - first <= NEAR
        if telling.sum() >= (len(units) if self.measured else 1):
            slopes = (seconds[first] - seconds[second])[telling] / distance[telling]
            self.each = max(_median(slopes, np.abs(distance[telling])), FLATTEST * level / self.usual)
            self.fixed = float(np.median(seconds - self.each * units))
            if self.fixed < 0:
                self.fixed, self.each = 0.0, float(np.median(seconds / units))
            self.measured = True
        else:
            if not self.measured:
                self.fixed, self.each = self._guess * self.usual, 1 - self._guess
            scale = float(np.median(seconds / (self.fixed + self.each * units)))
            self.fixed, self.each = scale * self.fixed, scale * self.each
        ratios = seconds / (self.fixed + self.each * units)
        self.spread = float(np.clip(np.quantile(ratios, SURE), 1.0, WIDEST))


Mark = float | torch.cuda.Event
"""A moment: of the host's clock, or where the device's stream has come so far."""


class _Pass(NamedTuple):
    price: Price
    units: float
    start: Mark
    end: Mark


class PassClock:
    """Times passes between two marks. On a CPU the host does the work, and marks are its own clock. On a GPU they are
    events, which are read once the device has reached them: nobody waits for that."""

    def __init__(self, device: torch.device):
        self.waits = device.type != "cuda"
        """Whether a pass has ended when its call returns."""
        self._device = device
        self._open: deque[_Pass] = deque()

    def mark(self) -> Mark:
        """Return the moment at which what was launched so far has run."""
        if self.waits:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, price: Price, units: float, start: Mark) -> None:
        """Note that a pass of so many units, begun at a mark, ends here; `price` is told when its time is known."""
        self._open.append(_Pass(price, units, start, self.mark()))

    def settle(self) -> None:
        """Tell prices of the passes that have ended."""
        while self._open and _reached(self._open[0].end):
            price, units, start, end = self._open.popleft()
            price.learn(units, _seconds(start, end))


def _reached(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    return start.elapsed_time(end) / 1e3


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Compute a weighted median."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
