"""A pass of many rows as several passes of some, each by a thread of its own.

Threads that share every product of a small model wait for each other at each; these wait once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import TypeVar

import torch

T = TypeVar("T")
MOST = 8
"""Threads of a team: what they read comes from one memory, and each holds what a compiled pass needs of its own."""


class Team:
    """So many threads, but at most `MOST`, whoever asks for a pass among them."""

    def __init__(self, threads: int):
        self.threads = min(threads, MOST)

    def shares(self, rows: int, least: int) -> list[slice]:
        """The rows that each thread takes: as many of them as have at least so many, about equally."""
        count = max(1, min(self.threads, rows // least))
        ends = [rows * (share + 1) // count for share in range(count)]
        return [slice(*part) for part in zip([0, *ends], ends, strict=False)]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each says; all have ended where one raises. Each call's own work is to be of one thread."""
        if len(calls) == 1:
            return [calls[0]()]
        own = torch.get_num_threads()
        torch.set_num_threads(1)
        begun = [self._others.submit(_inferred, call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            torch.set_num_threads(own)
            wait(begun)
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
