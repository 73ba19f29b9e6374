"""Which replica answers a call: the one that a picture is at home with, as long as it has a slot free."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def home(picture: bytes, names: Sequence[str]) -> str:
    """Whom a picture is at home with, by the largest hash (rendezvous hashing): when a replica comes or goes, only the
    pictures that it gets or had move."""
    return max(names, key=lambda name: hashlib.blake2b(picture + name.encode(), digest_size=8).digest())


class PictureRouter(RequestRouter):
    """Ray Serve takes the replica with the fewest requests of the first group that has one with room."""

    def initialize_state(self, slots: int = 1, **_: Any) -> None:  # type: ignore[override]
        """`slots`: requests that a replica answers at once, beyond which another one that is idle is faster."""
        self._slots = slots

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """First the home of the call's picture, if it is not busy, then all."""
        if pending_request is not None:  # Ray Serve's: without it, it would ask again at once where all are full
            pending_request.routing_context.should_backoff = True
        every = random.sample(candidate_replicas, len(candidate_replicas))  # of equal ones it takes the first
        picture = getattr(next(iter(pending_request.args), None), "picture", None) if pending_request else None
        if picture is None or not every:
            return [every]
        by_name = {replica.replica_id.unique_id: replica for replica in every}
        first = by_name[home(picture, sorted(by_name))]
        running = self.replica_queue_len_cache.get(first.replica_id)
        return [every] if (running or 0) >= self._slots else [[first], every]
