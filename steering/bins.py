"""How a quantity spreads: counts between bounds, kept while the engine works and read by whoever wants to know."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Bins:
    """A histogram. One thread adds; any may read, and finds counts that fit together up to what was added meanwhile.

    `bounds` are the upper bounds of its parts, ascending; a last part has none. `total` is the sum of what was added.
    """

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None, total: float = 0.0):
        """With `counts` of its parts and their `total`, as it was found elsewhere."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1) if counts is None else list(counts)
        self.total = total

    @property
    def counts(self) -> list[int]:
        """(bounds + 1) how many values there are in each part."""
        return list(self._counts)

    def add(self, value: float) -> None:
        """Count a value; one that is a bound is counted below it."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def clear(self) -> None:
        """Forget everything that was added."""
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def cumulative(self) -> list[int]:
        """(bounds + 1) how many values are at most each bound, and how many there are."""
        return list(accumulate(self._counts))
