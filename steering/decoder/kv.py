"""The KV cache: keys and values of every slot, and of blocks of tokens that outlive their slot.

Layers with linear attention or a convolution have recurrent states instead (`steering.recurrent`), in the pool as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import torch

from steering.devices import to_device, zeros
from steering.recurrent.states import RecurrentStates

LEAST = 256
"""Least number of columns of `KVPool.rounded`."""


class KVPool:
    """Keys and values of every slot: per layer two tensors (slots, kv_heads, length, head_dim).

    They are made at first use, unless `allot` made them. A layer may share those of an earlier one (Gemma 4).
    """

    def __init__(self, slots: int, length: int):
        self.slots = slots
        self.length = length
        self.states = RecurrentStates(slots)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], layers: Sequence[int], recurrent: Sequence[int] = ()) -> Self:
        """Return the pool of another one's `tensors`, with the numbers of its layers of either kind."""
        pool = cls(tensors[0].shape[0], tensors[0].shape[2])
        pool._layers = {layer: (tensors[2 * at], tensors[2 * at + 1]) for at, layer in enumerate(layers)}
        pool.states = RecurrentStates.of(pool.slots, recurrent, tensors[2 * len(layers) :])
        return pool

    @property
    def bytes(self) -> int:
        """Bytes of keys and values: slots x length x 2 x layers x KV heads x head width x bytes of the dtype."""
        return sum(tensor.nbytes for tensor in self.distinct)

    @property
    def layers(self) -> int:
        """The number of layers that have keys and values."""
        return len(self._layers)

    @property
    def column_bytes(self) -> int:
        """Bytes of keys and values of one column in one layer; 0 before any are made."""
        first = next(iter(self._layers.values()), ())
        return sum(tensor.nbytes for tensor in first) // (self.slots * self.length)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Keys and values of every layer, in the order in which layers first ran, which is their own, then its `states`."""
        yield from (tensor for tensors in self._layers.values() for tensor in tensors)
        yield from self.states.tensors

    @property
    def distinct(self) -> list[torch.Tensor]:
        """Keys and values, each tensor once."""
        layers = {id(tensors): tensors for tensors in list(self._layers.values())}
        return [tensor for tensors in layers.values() for tensor in tensors]

    def rounded(self, columns: int) -> int:
        """Return one of few numbers of columns, each at most half as large again as the previous one, that is enough."""
        size = LEAST
        while size < columns:
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        return min(size, self.length)

    def allot(self, like: KVPool) -> None:
        """Make the tensors of all layers now, shaped after those of another pool."""
        first: dict[int, int] = {}  # layers by the tensors of the other pool that they were the first to have
        for index, tensors in like._layers.items():
            owner = first.setdefault(id(tensors), index)
            self._layers[index] = self.layer(owner, *tensors)
        self.states.allot(like.states)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two tensors of a layer, shaped after the first key and value that it gets."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return zeros, because a masked column of garbage could be NaN and 0 * NaN is NaN."""
        return zeros((self.slots, like.shape[1], self.length, like.shape[3]), like)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy the first `length` columns of one slot to another, except the first `start`, without recurrent states."""
        for tensor in self.distinct:
            tensor[target, :, start:length] = tensor[source, :, start:length]

    def clear(self, slot: int) -> None:
        """Zero a slot, so that what a faulty sequence left cannot leak into its successor through 0 * NaN."""
        for tensor in self.distinct:
            tensor[slot].zero_()
        self.states.clear(slot)


class ColumnPool(KVPool):
    """A pool of one column, in which a layer that attends to the keys and values of another one shares its tensors."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for owner, given in self._given.items():
            if given[0] is key and given[1] is value:
                self._layers[index] = self._layers[owner]
        self._given[index] = key, value
        return super().layer(index, key, value)


class KVBlocks:
    """Keys and values of blocks of `size` tokens each, copied out of slots and back into them.

    Each tensor of the pool has a counterpart (blocks, kv_heads, size, head_dim), with as many blocks as `capacity` bytes
    hold.
    """

    def __init__(self, pool: KVPool, size: int, capacity: int):
        self.bytes_each = sum(tensor[0, :, :size].numel() * tensor.element_size() for tensor in pool.distinct)
        self.count = capacity // self.bytes_each
        self._pairs = [self._pair(tensor, size) for tensor in pool.distinct]

    def _pair(self, pooled: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pool tensor viewed as (slots, blocks of a slot, kv_heads, size, head_dim), and one for its blocks."""
        end = pooled.shape[2] // size * size
        blocks = pooled[:, :, :end].unflatten(2, (-1, size)).transpose(1, 2)
        return blocks, zeros((self.count, *blocks.shape[2:]), pooled)

    def save(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Copy a slot's columns from first * size on into these blocks."""
        index = _Index(blocks)
        for pooled, store in self._pairs:
            store[index.on(store.device)] = pooled[slot, first : first + len(blocks)]

    def load(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Copy these blocks into a slot's columns from first * size on."""
        if not blocks:
            return
        index = _Index(blocks)
        for pooled, store in self._pairs:
            pooled[slot, first : first + len(blocks)] = store[index.on(store.device)]


class _Index:
    """An index of numbers: a slice where they are consecutive, which copies faster, otherwise a tensor."""

    def __init__(self, numbers: Sequence[int]):
        first = numbers[0]
        follow = list(numbers) == list(range(first, first + len(numbers)))
        self._slice = slice(first, first + len(numbers)) if follow else None
        self._tensor = torch.tensor(numbers)
        self._copies: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> slice | torch.Tensor:
        if self._slice is not None:
            return self._slice
        if device not in self._copies:
            self._copies[device] = to_device(self._tensor, device)
        return self._copies[device]
