"""Routing of calls to replicas: a call goes to its image's home replica as long as that has a free slot."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def home(picture: bytes, names: Sequence[str]) -> str:
    """Return the home replica of an image by its largest hash (rendezvous hashing).

    When a replica comes or goes, only the images that it gains or had move.
    """
    return max(names, key=lambda name: hashlib.blake2b(picture + name.encode(), digest_size=8).digest())


class PictureRouter(RequestRouter):
    """A router that prefers the home of an image.

    Ray Serve takes the replica with the fewest requests of the first group that has one with room.
    """

    def initialize_state(self, slots: int = 1, **_: Any) -> None:
        """Set `slots`, the requests that a replica answers at once; beyond them an idle replica is faster."""
        self._slots = slots

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the home of the call's image, unless busy, then all replicas."""
        if pending_request is not None:  # without it Ray Serve would retry at once while all replicas are full
            pending_request.routing_context.should_backoff = True
        every = random.sample(candidate_replicas, len(candidate_replicas))  # Ray Serve takes the first of equal ones
        picture = getattr(next(iter(pending_request.args), None), "picture", None) if pending_request else None
        if picture is None or not every:
            return [every]
        by_name = {replica.replica_id.unique_id: replica for replica in every}
        first = by_name[home(picture, sorted(by_name))]
        running = self.replica_queue_len_cache.get(first.replica_id)
        return [every] if (running or 0) >= self._slots else [[first], every]
