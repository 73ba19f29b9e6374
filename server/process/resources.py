"""What the worker process has to answer with: threads, and open files."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MOST_FILES = 65_536
"""Open files that the process asks for."""


class Threads:
    """A pool that knows how many requests, and how many bytes of them, wait for one of its threads."""

    def __init__(self, count: int, name: str):
        self.queued = self.queued_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count, name)

    def submit(self, size: int, act: Callable[[], object]) -> None:
        """Have a thread act; `size` bytes are held until it begins."""
        self._count(1, size)
        self._pool.submit(self._run, size, act)

    def end(self) -> None:
        """Drop what waits; what runs goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, size: int, act: Callable[[], object]) -> None:
        self._count(-1, -size)
        act()

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.queued += requests
            self.queued_bytes += size


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
