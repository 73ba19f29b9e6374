"""Histograms that the engine fills while any thread reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """A histogram. One thread adds; any may read, and gets counts that are consistent up to concurrent additions.

    `bounds` are the upper bounds of its parts, ascending; a last part has none. `total` is the sum of the values added.
    """

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None, total: float = 0.0):
        """Start with `counts` of its parts and their `total`, as recorded elsewhere."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1) if counts is None else list(counts)
        self.total = total

    @property
    def counts(self) -> list[int]:
        """The number of values in each part, (bounds + 1)."""
        return list(self._counts)

    def add(self, value: float) -> None:
        """Count a value; one that equals a bound is counted below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def clear(self) -> None:
        """Forget everything that was added."""
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def cumulative(self) -> list[int]:
        """Return the number of values that are at most each bound, and their total number, (bounds + 1)."""
        return list(accumulate(self._counts))
