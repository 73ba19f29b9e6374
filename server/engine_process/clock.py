"""Since when the engine is at a step, for the worker, which must find that it hangs without asking it."""

from __future__ import annotations

import ctypes
import math
import mmap
import time


class StepClock:
    """A time that two processes share, if it is made before the one forks the other. It is written and read as one number,
    which `struct` would clear first, so that the other might find a step that never ended."""

    def __init__(self) -> None:
        self._since = ctypes.c_double.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self.rest()

    def step(self) -> None:
        """A step begins."""
        self._since.value = time.monotonic()

    def rest(self) -> None:
        """It has ended."""
        self._since.value = math.inf

    @property
    def stepping(self) -> float:
        """Seconds since the step that runs has begun; -infinity while none does."""
        return time.monotonic() - float(self._since.value)
