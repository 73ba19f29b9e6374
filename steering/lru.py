"""A bounded cache of large values that may be requested again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteBoundedLRU(Generic[Value]):
    """Values by a key, at most `capacity` bytes, counted by `size`, dropping the least recently used; thread-safe."""

    def __init__(self, capacity: int, size: Callable[[Value], int]):
        self.capacity = capacity
        self.bytes = 0
        self._size = size
        self._entries: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Value | None:
        """Return the value, if it is kept."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep a value, unless it is larger than the capacity."""
        size = self._size(value)
        with self._lock:
            if size <= self.capacity and key not in self._entries:
                self._entries[key] = value
                self.bytes += size
            while self.bytes > self.capacity:
                self.bytes -= self._size(self._entries.popitem(last=False)[1])

    def drop(self, key: Hashable) -> None:
        """Drop a value, if it is kept."""
        with self._lock:
            if key in self._entries:
                self.bytes -= self._size(self._entries.pop(key))

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0
