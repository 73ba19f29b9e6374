"""The self-check's recorder of what each layer adds to the residual stream.

It checks that a layer's output is its input plus the two updates that hooks are given, and measures how far these diverge,
for models whose calibration lacks that.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.decoder.hooks import LayerHook
from steering.decoder.updates import Updates
from steering.measures import divergence
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Slots

TOLERANCE = 1e-3
"""The largest allowed difference relative to a layer's addition, besides the rounding of the stream itself."""
ROUNDINGS = 4
"""The number of units in the last place of the stream that count as rounding."""


class AdditionRows(LayerHook):
    """Compares h_in + mha + ffn with h_out.

    Appends each layer's largest excess over the tolerance, a scalar, to `excess`, and D of its tokens to `divergences`, by
    layer, where these are given.
    """

    def __init__(self, excess: list[torch.Tensor], divergences: dict[int, list[torch.Tensor]] | None = None):
        self._excess, self._divergences = excess, divergences

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if updates.known:
            rounding = ROUNDINGS * torch.finfo(plain.dtype).eps
            before = updates.stream(before)
            inputs, added, out = before.float(), updates.mha.float() + updates.ffn.float(), plain.float()
            allowed = TOLERANCE * (out - inputs).norm(dim=-1) + rounding * (inputs.norm(dim=-1) + out.norm(dim=-1))
            self._excess.append(((inputs + added - out).norm(dim=-1) - allowed).amax().to("cpu", torch.float32))
            if self._divergences is not None:
                diverged = divergence(updates.mha, updates.ffn).flatten().to("cpu", torch.float32)
                self._divergences.setdefault(layer, []).append(diverged)
        return hidden


class AdditionSlots(Slots):
    """Checks every layer of every pass."""

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
        """True if every layer's updates were seen to be its whole addition; NaN counts as a difference."""
        traced = self.pool.mllm.updates_add_up
        return traced and bool(self._excess) and bool((torch.stack(self._excess) <= 0).all())

    def divergence(self) -> torch.Tensor:
        """Return D of every token of the prompts, (layers, tokens); no prompt may have been padded."""
        return torch.stack([torch.cat(self._divergences[layer]) for layer in sorted(self._divergences)])
