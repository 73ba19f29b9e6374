"""The start time of the engine's current step, by which the parent detects a hang without asking the engine."""

from __future__ import annotations

import ctypes
import math
import mmap
import time


class StepClock:
    """A time shared by two processes; create it before forking.

    It is written as one double, since `struct` would clear it first and the other process could read a step that never ends.
    """

    def __init__(self) -> None:
        self._since = ctypes.c_double.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
        self.rest()

    def step(self) -> None:
        """Record that a step begins."""
        self._since.value = time.monotonic()

    def rest(self) -> None:
        """Record that the step has ended."""
        self._since.value = math.inf

    @property
    def stepping(self) -> float:
        """Seconds since the current step began; -infinity between steps."""
        return time.monotonic() - float(self._since.value)
