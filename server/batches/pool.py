"""Bounded work on a stream: several items at once, their results in order, no more of them a second than allowed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Pace:
    """A limit of `rate` items a second, evenly spaced; None is no limit."""

    def __init__(
        self,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._between = 0.0 if rate is None else 1 / rate
        self._clock, self._sleep = clock, sleep
        self._next = clock()

    def wait(self) -> None:
        """Wait until the next item may begin."""
        now = self._clock()
        if now < self._next:
            self._sleep(self._next - now)
        self._next = max(now, self._next) + self._between


def in_order(
    items: Iterable[Item | None], work: Callable[[Item], Result], at_once: int, pace: Pace | None = None
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, in the order of the items, which are taken as they are needed.

    An item None means that there is none now: finished results are yielded meanwhile. Items not begun when the iteration
    ends are not worked on.
    """
    pending: deque[tuple[Item, Future[Result]]] = deque()
    workers = ThreadPoolExecutor(at_once, "helmsight-batch")
    try:
        for item in items:
            if item is not None:
                if pace is not None:
                    pace.wait()
                pending.append((item, workers.submit(work, item)))
            while pending and (pending[0][1].done() or len(pending) >= 2 * at_once):
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        workers.shutdown(cancel_futures=True)
