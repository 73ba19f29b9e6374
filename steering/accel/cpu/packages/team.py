"""A pass of many rows as several passes of some, each by a thread of its own.

Threads that share every product of a small model wait for each other at each; these wait once. Where other processes need
the processors, too, even that takes longer than one thread does for all rows: then mostly one does.
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
"""Threads of a team: what they read comes from one memory, and each holds what a compiled pass needs of its own."""


LATE = 0.5
"""Of the time that its own share takes, how long whoever runs a pass may wait for the others, in the mean, before it rather
runs all of it: alone it would take up to twice as long, less where what takes time is to read weights."""
TRIED = 32
"""Of so many passes that one thread runs, one is shared, to see whether the others are late yet."""
_WEIGHT = 0.2
"""Of a new time in that mean, in which a pause of the machine is no more than one's own share."""


class Team:
    """So many threads, but at most `MOST`, whoever asks for a pass among them."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic):
        self.threads = min(threads, MOST)
        self._clock = clock
        self._late = 0.0
        self._alone = 0

    def shares(self, rows: int, least: int) -> list[slice]:
        """The rows that each thread takes: as many of them as have at least so many, about equally; one takes all, mostly,
        while others are late."""
        count = max(1, min(self.threads, rows // least))
        if count > 1 and self._late > LATE:
            self._alone = (self._alone + 1) % TRIED
            count = 1 if self._alone else count
        ends = [rows * (share + 1) // count for share in range(count)]
        return [slice(*part) for part in zip([0, *ends], ends, strict=False)]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each says; all have ended where one raises. Each call's own work is to be of one thread."""
        if len(calls) == 1:
            return [calls[0]()]
        own = torch.get_num_threads()
        torch.set_num_threads(1)
        began = self._clock()
        begun = [self._others.submit(_inferred, call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            ended = self._clock()
            torch.set_num_threads(own)
            wait(begun)
        late = (self._clock() - ended) / max(ended - began, 1e-9)
        self._late += _WEIGHT * (min(late, 1.0) - self._late)
        return [first, *[one.result() for one in begun]]

    @cached_property
    def _others(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads - 1, "helmsight-pass", _begin)


def _begin() -> None:
    torch.get_num_threads()  # has a thread begin with what any other one was told last
    torch.set_num_threads(1)


def _inferred(call: Callable[[], T]) -> T:
    with torch.inference_mode():  # which each thread is in by itself
        return call()
