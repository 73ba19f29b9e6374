"""Passes of many rows split into several passes of some, each in its own thread.

Threads that share every product of a small model wait for each other at each product; these wait once. Where other processes
need the processors, even that takes longer than one thread does for all rows; then mostly a single thread runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import TypeVar

import torch

T = TypeVar("T")
MOST = 8
"""Maximum number of threads: they share one memory bandwidth, and each needs its own working memory."""


LATE = 0.5
"""Maximum mean wait for the other threads, in multiples of the own share's time, before one thread runs all rows.

Alone it takes up to twice as long, less where reading weights dominates.
"""
TRIED = 32
"""Number of passes in one thread after which one is shared, to see whether the others are still late."""
_WEIGHT = 0.2
"""Weight of a new time in that mean, in which a pause of the machine counts no more than the own share."""


class Team:
    """A group of threads, at most `MOST`, that share passes; the caller's thread is one of them."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic):
        self.threads = min(threads, MOST)
        self._clock = clock
        self._late = 0.0
        self._alone = 0

    def shares(self, rows: int, least: int) -> list[slice]:
        """Return the rows of each thread, about equal, with at least `least` rows each.

        While others are late, mostly a single share takes all rows.
        """
        count = max(1, min(self.threads, rows // least))
        if count > 1 and self._late > LATE:
            self._alone = (self._alone + 1) % TRIED
            count = 1 if self._alone else count
        ends = [rows * (share + 1) // count for share in range(count)]
        return [slice(*part) for part in zip([0, *ends], ends, strict=False)]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return each call's result; all have ended where one raises. Each call must use a single thread."""
        if len(calls) == 1:
            return [calls[0]()]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        began = self._clock()
        begun = [self._other_threads.submit(_call_without_gradients, call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            ended = self._clock()
            torch.set_num_threads(threads)
            wait(begun)
        late = (self._clock() - ended) / max(ended - began, 1e-9)
        self._late += _WEIGHT * (min(late, 1.0) - self._late)
        return [first, *[future.result() for future in begun]]

    @cached_property
    def _other_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads - 1, "helmsight-pass", _begin)


def _begin() -> None:
    torch.get_num_threads()  # makes a thread take over the number that any other thread was set to last
    torch.set_num_threads(1)


def _call_without_gradients(call: Callable[[], T]) -> T:
    with torch.inference_mode():  # inference mode is per thread
        return call()
