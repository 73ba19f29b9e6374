"""Checks, in the self-check's passes, that each layer's output is its input plus the two updates that hooks are given."""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.decoder.hooks import LayerHook
from steering.decoder.updates import Updates
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Slots

TOLERANCE = 1e-3
"""Largest difference relative to what a layer adds, beside the rounding of the stream itself."""
ROUNDINGS = 4
"""How many units in the last place of the stream are rounding."""


class AdditionRows(LayerHook):
    """Compares h_in + mha + ffn with h_out; appends each layer's largest excess over the tolerance to `excess`, a scalar."""

    def __init__(self, excess: list[torch.Tensor]):
        self._excess = excess

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if updates.traced:
            rounding = ROUNDINGS * torch.finfo(plain.dtype).eps
            given, added, out = before.float(), updates.mha.float() + updates.ffn.float(), plain.float()
            allowed = TOLERANCE * (out - given).norm(dim=-1) + rounding * (given.norm(dim=-1) + out.norm(dim=-1))
            self._excess.append(((given + added - out).norm(dim=-1) - allowed).amax().to("cpu", torch.float32))
        return hidden


class AdditionSlots(Slots):
    """Looks at every layer of every pass."""

    always: ClassVar[bool] = True

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self._excess: list[torch.Tensor] = []

    def prefill(self, chunk: PrefillChunk) -> AdditionRows:
        return AdditionRows(self._excess)

    def decode(self, batch: DecodeBatch) -> AdditionRows:
        return AdditionRows(self._excess)

    @property
    def exact(self) -> bool:
        """Whether every layer's updates were seen to be what it adds; numbers that are none are not."""
        traced = self.pool.mllm.updates_add_up
        return traced and bool(self._excess) and bool((torch.stack(self._excess) <= 0).all())
