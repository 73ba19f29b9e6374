"""What the worker knows of the other process's room, so that under far too much load few requests are carried there to be
refused: each that is takes of the time between two steps, for which those that have room wait as well."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from server.engine_process.link import raised, told
from steering import Busy

PROBED, FORGOTTEN = 0.05, 0.2
"""Seconds after a refusal from which one request may find whether there is room again, and from which all may."""


@dataclass
class _Refusal:
    busy: Busy
    at: float
    room: int = 0
    probing: bool = False


class RemoteRoom:
    """By group: after a refusal, as many requests as answers have ended since. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: dict[str, _Refusal] = {}

    def check(self, group: str) -> None:
        """Raise Busy where a request of that group would be refused, as far as is known."""
        with self._lock:
            self._known(group)

    def take(self, group: str, answers: int) -> None:
        """So many answers are asked for now; raises as `check`."""
        with self._lock:
            refusal = self._known(group)
            if refusal is not None:
                refusal.probing |= refusal.room <= 0
                refusal.room -= answers

    def answered(self, group: str, answers: int, found: object) -> None:
        """So many answers were asked for, and are refused or taken; `found` is an error or none."""
        with self._lock:
            refusal = self._refusals.get(group)
            if isinstance(found, Busy) and answers == 1:
                self._refusals[group] = _Refusal(found, time.monotonic())
            elif refusal is not None and refusal.probing:  # what was known is out of date
                del self._refusals[group]
            elif refusal is not None and isinstance(found, Exception):
                refusal.room += answers

    def ended(self, answers: int) -> None:
        """So many answers have ended."""
        with self._lock:
            for refusal in self._refusals.values():
                refusal.room += answers

    def _known(self, group: str) -> _Refusal | None:
        refusal = self._refusals.get(group)
        if refusal is None:
            return None
        age = time.monotonic() - refusal.at
        if age >= FORGOTTEN:
            del self._refusals[group]
            return None
        if refusal.room <= 0 and (age < PROBED or refusal.probing):
            raise raised(told(refusal.busy))
        return refusal
