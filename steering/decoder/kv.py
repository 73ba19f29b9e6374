"""The keys and values of every slot."""

from __future__ import annotations

import numpy as np
import torch


class KVPool:
    """Keys and values of every slot: per layer two tensors (slots, kv_heads, length, head_dim), made at first use."""

    def __init__(self, slots: int, length: int):
        self.slots = slots
        self.length = length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def bytes(self) -> int:
        """What all tensors take: slots x length x 2 x layers x KV heads x head width x bytes of the dtype."""
        return sum(tensor.nbytes for tensors in list(self._layers.values()) for tensor in tensors)

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of a layer, shaped after the first key and value that it gets."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, because a masked column of garbage could be NaN and 0 * NaN is NaN."""
        shape = (self.slots, like.shape[1], self.length, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # numpy's zeros are pages that the system commits when they are first written: an idle slot costs no memory.
        raw = np.zeros((*shape[:-1], shape[-1] * like.element_size()), np.uint8)
        return torch.from_numpy(raw).view(like.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot, so that what a faulty sequence left cannot leak into its successor through 0 * NaN."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slot].zero_()
