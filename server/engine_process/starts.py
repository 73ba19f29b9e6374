"""How often in a row a worker was started that never had its model ready, known to gunicorn's master and all its workers.

A process that is killed while it loads says nothing of its model, so that another one is started. Where none of them was
ever ready, for want of memory say, that would go on for ever.
"""

from __future__ import annotations

import ctypes
import mmap

TRIES = 4
"""Workers in a row that may end while they load, before the server ends, if it never was ready."""
MOST = 32.0
"""Seconds that a worker waits at most before it loads."""


class _Shared(ctypes.Structure):
    _fields_ = (("tries", ctypes.c_int), ("served", ctypes.c_bool))


class Starts:
    """Made in the master, which says that a worker begins; the worker says that it is ready."""

    def __init__(self) -> None:
        self._shared = _Shared.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))

    def begin(self) -> None:
        """One more worker is about to be started."""
        self._shared.tries += 1

    def ready(self) -> None:
        """Its model has been loaded."""
        self._shared.tries, self._shared.served = 0, True

    @property
    def hopeless(self) -> bool:
        """Whether no further worker is worth a try."""
        return not self._shared.served and self._shared.tries >= TRIES

    @property
    def wait(self) -> float:
        """Seconds that the worker that was begun last waits before it loads: none after one that served or was the first to
        fail, then more and more."""
        failed = self._shared.tries - 1
        return 0.0 if failed < 2 else min(MOST, 2.0 ** (failed - 1))
