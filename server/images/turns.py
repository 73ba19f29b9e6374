"""Whose pictures are prepared now. Decoding them takes seconds, before the engine's queue knows of the request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steering import Busy

KEPT = 8
"""Of the places of those who wait one in so many is kept for groups of which nobody does."""
LOOK = 0.1
"""Seconds after which who waits looks whether anybody waits for him."""
_WEIGHT = 0.2


class PictureTurns:
    """`at_once` are at work at the same time, and groups get their turns one after the other, however many each has waiting.
    `most` may wait, and with `longest` none that would wait longer than so many seconds, by the mean of those before. Any
    thread may call it."""

    def __init__(self, at_once: int, most: int = 64, longest: float | None = None):
        self._at_once, self._most, self._longest = at_once, most, longest
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[threading.Event]] = {}  # the next group first; each is told, and nobody else
        self._at_work = 0
        self._seconds = 0.0

    @property
    def held(self) -> int:
        """How many are at work, or wait."""
        with self._lock:
            return self._at_work + self._count()

    @contextmanager
    def turn(self, group: str = "", check: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Within, it is a group's turn. `check` raises where who waits need wait no longer; Busy where too many do."""
        called = threading.Event()
        with self._lock:
            self._refuse(group)
            self._waiting.setdefault(group, deque()).append(called)
            self._call()
        began = None
        try:
            while not called.wait(LOOK):
                check()
            began = time.monotonic()
            yield
        finally:
            with self._lock:
                if called.is_set():
                    self._at_work -= 1
                else:
                    self._remove(group, called)
                if began is not None:
                    took = time.monotonic() - began
                    self._seconds += _WEIGHT * (took - self._seconds) if self._seconds else took
                self._call()

    def _count(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def _call(self) -> None:
        """Have those begin whose turn it is."""
        while self._waiting and self._at_work < self._at_once:
            group = next(iter(self._waiting))
            called = self._waiting[group][0]
            self._remove(group, called)
            self._at_work += 1
            called.set()

    def _remove(self, group: str, called: threading.Event) -> None:
        """Take one out of those who wait; its group's next one is behind the other groups'."""
        queue = self._waiting.pop(group)
        queue.remove(called)
        if queue:
            self._waiting[group] = queue

    def _refuse(self, group: str) -> None:
        """Raise Busy where one more of a group may not wait."""
        waiting = self._count()
        if not waiting and self._at_work < self._at_once:
            return
        wait = (waiting // self._at_once + 1) * self._seconds
        kept = self._most // KEPT if group in self._waiting else 0
        if waiting >= self._most - kept:
            raise Busy(waiting, max(wait, 1.0))
        if self._longest is not None and wait > self._longest:
            raise Busy(waiting, max(wait - self._longest, 1.0), self._longest)
