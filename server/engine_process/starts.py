"""A count of successive workers that never had their model ready, shared by gunicorn's master and all workers.

A process that is killed while it loads reports nothing, so that another one is started. If none ever becomes ready, for lack
of memory for example, that would go on for ever.
"""

from __future__ import annotations

import ctypes
import mmap

TRIES = 4
"""Successive workers that may end while they load before a server that never was ready gives up."""
MOST = 32.0
"""Longest time in seconds that a worker waits before it loads."""


class _Shared(ctypes.Structure):
    _fields_ = (("tries", ctypes.c_int), ("served", ctypes.c_bool))


class Starts:
    """A counter created in the master, which counts starts; workers report that they are ready."""

    def __init__(self) -> None:
        self._shared = _Shared.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))

    def begin(self) -> None:
        """Count a worker that is about to start."""
        self._shared.tries += 1

    def ready(self) -> None:
        """Record that a worker's model has been loaded."""
        self._shared.tries, self._shared.served = 0, True

    @property
    def hopeless(self) -> bool:
        """True if starting further workers is pointless."""
        return not self._shared.served and self._shared.tries >= TRIES

    @property
    def wait(self) -> float:
        """Seconds that the last counted worker waits before it loads.

        Zero after a worker that served and after the first failure, then exponentially more.
        """
        failed = self._shared.tries - 1
        return 0.0 if failed < 2 else min(MOST, 2.0 ** (failed - 1))
