"""Limits of a key's holder on chats per time and on concurrent chats.

They are counted in memory, since one process serves a model and thus all keys; each of several replicas counts its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property

from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from server.access.ring import Holder
from server.errors import ApiError

SET_BACK = 5.0
"""Seconds beyond which a step back of the clock is more than drift."""


class Limiter:
    """Counts by the key's name, so that a key that replaces another of the same name continues its counts."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._offset = -math.inf
        self._lock = threading.Lock()

    def enter(self, holder: Holder) -> Callable[[], None]:
        """Count a chat and return a function that ends it once.

        Raises a 429 if there are too many; refused chats are not counted.
        """
        name = holder.group
        with self._lock:
            if holder.concurrent is not None and self._running[name] >= holder.concurrent:
                raise ApiError(
                    429,
                    f"The key {holder.name!r} allows at most {holder.concurrent} requests at the same time; "
                    "try again when one of them has ended.",
                    code="key_concurrency_exceeded",
                    retry_after=1.0,
                )
            if holder.rate is not None:
                self._mind_the_clock()
            if holder.rate is not None and not self._window.hit(holder.rate, name):
                often = "1 chat" if holder.rate.amount == 1 else f"{holder.rate.amount} chats"
                seconds = max(1, math.ceil(self._window.get_window_stats(holder.rate, name).reset_time - time.time()))
                raise ApiError(
                    429,
                    f"The key {holder.name!r} may send at most {often} in {_time(holder.rate.get_expiry())}; "
                    f"the next one in {seconds} second{'s' * (seconds > 1)}.",
                    code="key_rate_exceeded",
                    retry_after=seconds,
                )
            self._running[name] += 1
        return self._once(name)

    def headers(self, holder: Holder) -> dict[str, str]:
        """Return what is left of a holder's rate, in the headers of OpenAI and of Anthropic; empty without a rate."""
        if holder.rate is None:
            return {}
        with self._lock:
            opens, remaining = self._window.get_window_stats(holder.rate, holder.group)
        seconds = max(0, math.ceil(opens - time.time()))
        until = datetime.fromtimestamp(time.time() + seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return {
            "x-ratelimit-limit-requests": str(holder.rate.amount),
            "x-ratelimit-remaining-requests": str(remaining),
            "x-ratelimit-reset-requests": f"{seconds}s",
            "anthropic-ratelimit-requests-limit": str(holder.rate.amount),
            "anthropic-ratelimit-requests-remaining": str(remaining),
            "anthropic-ratelimit-requests-reset": until,
        }

    def _mind_the_clock(self) -> None:
        """Reset the counts if the clock was set back, since entries in the future would count until then."""
        before, self._offset = self._offset, time.time() - time.monotonic()
        if self._offset < before - SET_BACK:
            self._window.storage.reset()

    def _once(self, name: str) -> Callable[[], None]:
        unreleased = [name]

        def leave() -> None:
            with self._lock:
                if unreleased:
                    self._running[unreleased.pop()] -= 1
                    self._running += Counter()  # drops zero counts

        return leave

    @cached_property
    def _window(self) -> MovingWindowRateLimiter:
        # Created on first use, since the storage has a thread of its own.
        return MovingWindowRateLimiter(MemoryStorage())


def _time(seconds: int) -> str:
    units = {86_400: "day", 3600: "hour", 60: "minute", 1: "second"}
    size = next(size for size in units if seconds % size == 0)
    count = seconds // size
    return f"a{'n' * (size == 3600)} {units[size]}" if count == 1 else f"{count} {units[size]}s"
