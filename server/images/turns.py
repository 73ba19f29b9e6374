"""Turns for preparing images, since decoding takes seconds and happens before the engine's queue knows of the request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steering import Busy

KEPT = 8
"""Reserves one in so many waiting places for groups that have none waiting."""
LOOK = 0.1
"""Seconds between a waiting request's checks that its client still waits."""
_WEIGHT = 0.2


class _Call(threading.Event):
    """Calls a waiting request."""

    def __init__(self, large: bool):
        super().__init__()
        self.large = large


class PictureTurns:
    """A fair queue for preparing images; any thread may call it.

    At most `at_once` requests are prepared at a time, at most half of them with large images, and groups take turns, however
    many requests of each wait. At most `most` may wait and, with `longest`, none that is expected to wait for more seconds
    than that, by the mean time so far.
    """

    def __init__(self, at_once: int, most: int = 64, longest: float | None = None):
        self._places = (at_once, max(1, at_once // 2))  # for all, and for large ones
        self._most, self._longest = most, longest
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Call]] = {}  # the next group first
        self._at_work = [0, 0]  # small ones, and large ones
        self._seconds = [0.0, 0.0]

    @property
    def held(self) -> int:
        """The number of requests that are prepared or wait."""
        with self._lock:
            return sum(self._at_work) + self._count()

    @contextmanager
    def turn(self, group: str = "", check: Callable[[], object] = lambda: None, large: bool = False) -> Iterator[None]:
        """Wait for a group's turn, and hold it within the block; raises Busy if too many wait.

        `check` is called while waiting and raises once nobody waits for the request any more.
        """
        called = _Call(large)
        with self._lock:
            self._refuse(group, large)
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
                    self._at_work[large] -= 1
                else:
                    self._remove(group, called)
                if began is not None:
                    took = time.monotonic() - began
                    self._seconds[large] += _WEIGHT * (took - self._seconds[large]) if self._seconds[large] else took
                self._call()

    def _count(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def _call(self) -> None:
        """Start the next waiting requests while there are places."""
        while found := next(
            ((group, called) for group, queue in self._waiting.items() for called in queue if self._free(called.large)),
            None,
        ):
            group, called = found
            self._remove(group, called)
            self._at_work[called.large] += 1
            called.set()

    def _free(self, large: bool) -> bool:
        """Return True where a place is free for a request with large images, or for any other one."""
        return sum(self._at_work) < self._places[0] and (not large or self._at_work[True] < self._places[True])

    def _remove(self, group: str, called: _Call) -> None:
        """Remove a waiting request; its group's next one follows after the other groups'."""
        queue = self._waiting.pop(group)
        queue.remove(called)
        if queue:
            self._waiting[group] = queue

    def _refuse(self, group: str, large: bool) -> None:
        """Raise Busy if another request of a group may not wait."""
        waiting = self._count()
        alike = sum(called.large == large for queue in self._waiting.values() for called in queue)
        if not alike and self._free(large):
            return
        wait = (alike // self._places[large] + 1) * self._seconds[large]
        reserve = self._most // KEPT if group in self._waiting else 0
        if waiting >= self._most - reserve:
            raise Busy(waiting, max(wait, 1.0))
        if self._longest is not None and wait > self._longest:
            raise Busy(waiting, max(wait - self._longest, 1.0), self._longest)
