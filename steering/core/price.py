"""The price of a pass, learned from the times of passes on their device, for which the host does not wait."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

KEPT = 7
"""Number of passes that are kept of each size, the last ones."""
STEP = 1.5
"""Ratio between two sizes that count as different."""
STALE = 256
"""Number of later passes after which a pass no longer counts."""
BLIND = 64
"""Number of passes of one size after which another size should be measured."""
ENOUGH = 4
"""Number of new passes after which the price is fitted where it is needed."""
SELDOM = 64
"""Number of new passes after which it is fitted in any case: a fit takes a tenth of a short step."""
RECENT = 8
"""Number of passes that measure the current speed of the machine."""
FLATTEST = 0.01
"""Least price of a unit, as a share of a pass's cost per unit: with a price of zero any size would fit."""
SHORTEST = 1e-7
"""Least duration of a pass, in seconds: clocks may stand still."""
SIGMAS = 2.3
"""Standard deviations above the estimate that a pass within a bound may take."""
WIDEST = 1.5
"""Maximum of that factor: longer passes were outliers."""


class _Sample(NamedTuple):
    number: int
    units: float
    seconds: float


class Price:
    """Estimates the seconds of a pass of n units as `fixed + each * n`.

    A few passes of each size are kept. `each` is the median of the slopes between pairs of different sizes, weighted by
    their distance (Theil 1950, Sen 1968), and `fixed` is the median of the rest. Then both parts are scaled to the times of
    the last passes. So a quarter of the passes may be outliers: pauses of the machine, compilation, graph capture. The very
    first pass, a warm-up, counts only until there is a second one. `guess` is the share of a pass that is assumed to be
    fixed while all were of one size.
    """

    def __init__(self, guess: float = 0.0):
        self.fixed = 0.0
        self.each = 0.0
        self.spread = 1.0
        """Ratio of a slow pass's time to the estimate."""
        self.largest = 0.0
        """The largest size that is kept."""
        self.usual = 0.0
        """The median size of the last passes."""
        self.measured = False
        """True once passes of two sizes were measured."""
        self.count = 0
        self._guess = guess
        self._kept: dict[int, deque[_Sample]] = {}
        self._last: deque[_Sample] = deque(maxlen=RECENT)
        self._compared = 0
        self._new = 0  # passes since the last fit

    def learn(self, units: float, seconds: float) -> None:
        """Learn from one pass."""
        if self.count == 1:
            self._kept.clear()
            self._last.clear()
        number = self.count + 1
        sample = _Sample(number, units, max(seconds, SHORTEST))
        self._last.append(sample)
        self._kept.setdefault(_size(units), deque(maxlen=KEPT)).append(sample)
        self._new += 1
        if number < 2 * RECENT or self._new >= SELDOM:
            self._fit()
        self.count = number  # last, because other threads read the price of whatever is counted

    def refresh(self) -> None:
        """Fit the price to the last passes, where a few are new; the learning thread calls it before it needs prices."""
        if self._new >= ENOUGH:
            self._fit()

    def of(self, units: float) -> float:
        """Estimate the seconds of a pass of `units` units."""
        return self.fixed + self.each * units

    @property
    def worth(self) -> float:
        """The units that cost as much as the fixed part of a pass; smaller passes cost more than they bring."""
        return self.fixed / self.each if self.each else 0.0

    @property
    def blind(self) -> bool:
        """True where all recent passes had one size, so that the two parts of the price are unknown."""
        return not self.measured or self.count - self._compared > BLIND

    def _fit(self) -> None:
        self._new = 0
        self._forget()
        samples = [sample for passes in self._kept.values() for sample in passes]
        _, units, seconds = np.array(samples).T
        self.largest = float(units.max())
        if len(self._kept) > 1:
            newest = sorted(passes[-1].number for passes in self._kept.values())
            self._compared = newest[-2]
            self._compare(units, seconds)
        elif not self.measured:
            self.fixed, self.each = self._guess * float(np.median(units)), 1 - self._guess
        _, units, seconds = np.array(self._last).T
        self.usual = float(np.median(units))
        ratios = seconds / (self.fixed + self.each * units)
        scale = float(np.median(ratios))
        self.fixed, self.each = scale * self.fixed, scale * self.each
        deviation = 1.48 * float(np.median(np.abs(ratios / scale - 1)))  # a normal distribution's
        self.spread = min(1 + SIGMAS * deviation, WIDEST)

    def _compare(self, units: np.ndarray, seconds: np.ndarray) -> None:
        """Set both parts from passes of different sizes."""
        first, second = np.triu_indices(len(units), 1)
        distance = units[first] - units[second]
        telling = np.abs(distance) > (1 - 1 / STEP) * np.maximum(units[first], units[second])
        if not telling.any():
            return
        slopes = (seconds[first] - seconds[second])[telling] / distance[telling]
        flattest = FLATTEST * float(np.median(seconds / units))
        self.each = max(_median(slopes, np.abs(distance[telling])), flattest)
        self.fixed = float(np.median(seconds - self.each * units))
        if self.fixed < 0:
            self.fixed, self.each = 0.0, float(np.median(seconds / units))
        self.measured = True

    def _forget(self) -> None:
        """Drop stale passes."""
        for size, passes in list(self._kept.items()):
            while passes and passes[0].number < self.count - STALE:
                passes.popleft()
            if not passes:
                del self._kept[size]


def _size(units: float) -> int:
    return round(math.log(max(units, 1)) / math.log(STEP))


Mark = float | torch.cuda.Event
"""A moment: a time of the host's clock, or an event in the device's stream."""


class _Pass(NamedTuple):
    price: Price
    units: float
    start: Mark
    end: Mark


class PassClock:
    """A clock for passes between two marks.

    On a CPU the host does the work, and marks are its own clock. On a GPU they are events, which are read once the device
    has reached them, without waiting.
    """

    def __init__(self, device: torch.device):
        self.waits = device.type != "cuda"
        """True where a pass has ended when its call returns."""
        self._device = device
        self._open: deque[_Pass] = deque()

    def mark(self) -> Mark:
        """Return a mark for the moment at which everything launched so far has run."""
        if self.waits:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, price: Price, units: float, start: Mark) -> None:
        """Record that a pass of `units` units, begun at a mark, ends here; `price` learns its time once it is known."""
        self._open.append(_Pass(price, units, start, self.mark()))

    def settle(self) -> None:
        """Pass the times of ended passes to their prices."""
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
