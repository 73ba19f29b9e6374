"""The snapshots of recurrent states that outlive their slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from steering.recurrent.states import Snapshot, snapshot_bytes


class Snapshots:
    """Snapshots by key, of at most `capacity` bytes; the least recently used are dropped first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.bytes = 0
        self._kept: OrderedDict[Hashable, Snapshot] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __getitem__(self, key: Hashable) -> Snapshot:
        return self._kept[key]

    def keep(self, key: Hashable, snapshot: Snapshot) -> None:
        """Keep a snapshot, unless there is one of that key, or it is too large."""
        size = snapshot_bytes(snapshot)
        if key in self._kept or size > self.capacity:
            return
        while self.bytes + size > self.capacity:
            self.drop(next(iter(self._kept)))
        self._kept[key] = snapshot
        self.bytes += size

    def touch(self, key: Hashable) -> None:
        """Mark a snapshot as used, where there is one of that key."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def drop(self, key: Hashable) -> None:
        """Drop a snapshot, where there is one of that key."""
        self.bytes -= snapshot_bytes(self._kept.pop(key, {}))

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()
        self.bytes = 0
