"""Looks, in the self-check's passes, at what each layer adds: that its output is its input plus the two updates that hooks
are given, and how far these diverge, for models of which that was not calibrated.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.decoder.hooks import LayerHook
from steering.decoder.updates import Updates
from steering.measures import divergence
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Slots

TOLERANCE = 1e-3
"""Largest difference relative to what a layer adds, beside the rounding of the stream itself."""
ROUNDINGS = 4
"""How many units in the last place of the stream are rounding."""


class AdditionRows(LayerHook):
    """Compares h_in + mha + ffn with h_out; appends each layer's largest excess over the tolerance to `excess`, a scalar,
    and D of its tokens to `divergences`, by layer, where these are wanted.
    """

    def __init__(self, excess: list[torch.Tensor], divergences: dict[int, list[torch.Tensor]] | None = None):
        self._excess, self._divergences = excess, divergences

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if updates.known:
            rounding = ROUNDINGS * torch.finfo(plain.dtype).eps
            given, added, out = before.float(), updates.mha.float() + updates.ffn.float(), plain.float()
            allowed = TOLERANCE * (out - given).norm(dim=-1) + rounding * (given.norm(dim=-1) + out.norm(dim=-1))
            self._excess.append(((given + added - out).norm(dim=-1) - allowed).amax().to("cpu", torch.float32))
            if self._divergences is not None:
                diverged = divergence(updates.mha, updates.ffn).flatten().to("cpu", torch.float32)
                self._divergences.setdefault(layer, []).append(diverged)
        return hidden


class AdditionSlots(Slots):
    """Looks at every layer of every pass."""

    always: ClassVar[bool] = True

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self._excess: list[torch.Tensor] = []
        self._divergences: dict[int, list[torch.Tensor]] = {}

    def prefill(self, chunk: PrefillChunk) -> AdditionRows:
        return AdditionRows(self._excess, self._divergences)

    def decode(self, batch: DecodeBatch) -> AdditionRows:
        return AdditionRows(self._excess)

    @property
    def exact(self) -> bool:
        """Whether every layer's updates were seen to be what it adds; numbers that are none are not."""
        traced = self.pool.mllm.updates_add_up
        return traced and bool(self._excess) and bool((torch.stack(self._excess) <= 0).all())

    def divergence(self) -> torch.Tensor:
        """(layers, tokens): D of every token of the prompts, none of which were padded."""
        return torch.stack([torch.cat(self._divergences[layer]) for layer in sorted(self._divergences)])
