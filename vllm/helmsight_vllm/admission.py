"""The admission of contrast pairs: no more at once than have slots and cache blocks for both of their sides.

A side that is ahead holds what it has while it waits for the other. With more pairs than that, each could wait for another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PairAdmission:
    """Admits pairs in their order, within `pairs` at once and `tokens` of the cache in all; `admitted` have their place."""

    def __init__(self, pairs: int, tokens: int):
        self.most = tokens
        self.admitted = 0
        self._pairs, self._tokens = pairs, tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a place for a pair that needs at most so many tokens of the cache, and hold it."""
        entry = tokens, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self._admit()
        try:
            await entry[1]
            yield
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._pairs += 1
                self._tokens += tokens
                self.admitted -= 1
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._pairs and self._waiting[0][0] <= self._tokens:
            tokens, place = self._waiting.popleft()
            self._pairs -= 1
            self._tokens -= tokens
            self.admitted += 1
            if not place.done():
                place.set_result(None)
