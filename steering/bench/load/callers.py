"""Callers that each send one request after the other, in a closed loop, and their measured times."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

Work = TypeVar("Work")


@dataclass
class CallerTimes:
    """The times of all callers together, in seconds.

    first: until each answer's first piece. gaps: between the pieces of an answer. whole: from the first request to the last
    piece.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0

    @property
    def median_first(self) -> float:
        return statistics.median(self.first)

    @property
    def long_gap(self) -> float:
        """The 99th percentile of the gaps."""
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def ask_all(ask: Callable[[Work], Iterable[object]], works: Sequence[Work], callers: int) -> CallerTimes:
    """Run `callers` callers until no work is left; raise what `ask` raises.

    `ask` yields as pieces of an answer come.
    """
    times, pending, lock = CallerTimes(), iter(works), threading.Lock()
    failures: list[BaseException] = []

    def call() -> None:
        while (work := _next(pending, lock)) is not None and not failures:
            try:
                first, gaps = _clock(ask(work))
            except BaseException as error:
                failures.append(error)
                return
            with lock:
                times.first.append(first)
                times.gaps.extend(gaps)

    threads = [threading.Thread(target=call, name=f"caller-{number}", daemon=True) for number in range(callers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.whole = time.perf_counter() - begun
    if failures:
        raise failures[0]
    return times


def _next(pending: Iterator[Work], lock: threading.Lock) -> Work | None:
    with lock:
        return next(pending, None)


def _clock(pieces: Iterable[object]) -> tuple[float, list[float]]:
    """Return the seconds until the first piece, and between each and the next."""
    at = [time.perf_counter()]
    at += [time.perf_counter() for _ in pieces]
    if len(at) == 1:
        raise ValueError("An answer had no text.")
    return at[1] - at[0], [later - earlier for earlier, later in pairwise(at[1:])]
