"""The parent's estimate of the core's queue, by which it refuses most requests itself under overload.

Each request that is sent only to be refused takes time between two steps, which accepted requests wait for as well.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from steering.errors import Busy
from steering.messages.serialization import error_from_data, error_to_data

PROBED, FORGOTTEN = 0.05, 0.2
"""Seconds after a refusal from which one request may probe for room, and from which all are sent again."""


@dataclass
class _Refusal:
    busy: Busy
    at: float
    room: int = 0
    probing: bool = False


class RefusalEstimate:
    """Free places by group: after a refusal, as many as answers have ended since. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: dict[str, _Refusal] = {}

    def check(self, group: str) -> None:
        """Raise Busy if a request of that group would be refused, as far as is known."""
        with self._lock:
            self._recent(group)

    def take(self, group: str, answers: int) -> None:
        """Count a request of so many answers; raises as `check` does."""
        with self._lock:
            refusal = self._recent(group)
            if refusal is not None:
                refusal.probing |= refusal.room <= 0
                refusal.room -= answers

    def answered(self, group: str, answers: int, outcome: object) -> None:
        """Record the outcome of a request of so many answers; `outcome` is an error or anything else for success."""
        with self._lock:
            refusal = self._refusals.get(group)
            if isinstance(outcome, Busy) and answers == 1:
                self._refusals[group] = _Refusal(outcome, time.monotonic())
            elif refusal is not None and refusal.probing:  # the estimate is out of date
                del self._refusals[group]
            elif refusal is not None and isinstance(outcome, Exception):
                refusal.room += answers

    def ended(self, answers: int) -> None:
        """Record that so many answers have ended."""
        with self._lock:
            for refusal in self._refusals.values():
                refusal.room += answers

    def _recent(self, group: str) -> _Refusal | None:
        refusal = self._refusals.get(group)
        if refusal is None:
            return None
        age = time.monotonic() - refusal.at
        if age >= FORGOTTEN:
            del self._refusals[group]
            return None
        if refusal.room <= 0 and (age < PROBED or refusal.probing):
            raise error_from_data(*error_to_data(refusal.busy))
        return refusal
