"""What attention and FFN do to the residual stream, per layer (SAGE paper, sections 4.3 and 5.1).

Measured in the rows that generate tokens: the prompt's last row and that of every generated token that is fed. h_in, h_mid
and h_out are the stream before a layer, after its attention and after its FFN (before a steering vector is added).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from steering.interventions.think import divergence

if TYPE_CHECKING:
    from steering.residual import Updates

NAMES = ("mha_cosine", "ffn_cosine", "mha_change", "ffn_change", "kl", "neuron_ratio")
"""cos(h_in, h_mid); cos(h_mid, h_out); |h_mid - h_in| / |h_in|; |h_out - h_mid| / |h_mid|; D of Think; the share of the
FFN's gates whose pre-activation is above 0."""


class ResidualRows:
    """The updates of one forward pass, kept layer by layer and reduced together. last: (rows,), which query of each row is
    kept in a prefill; None for the only one."""

    def __init__(self, last: torch.Tensor | None = None):
        self._last = last
        self._layers: list[tuple[torch.Tensor | None, ...]] = []

    def keep(self, hidden: torch.Tensor, updates: Updates, steered: torch.Tensor) -> None:
        """Called behind a layer. hidden: (rows, n, d), its output; steered: that with the vectors that were added."""
        kept = (hidden, updates.mha, updates.ffn, updates.gate, steered)
        if self._last is None:
            self._layers.append(tuple(None if value is None else value[:, -1] for value in kept))
            return
        rows = torch.arange(len(hidden), device=hidden.device)
        self._layers.append(tuple(None if value is None else value[rows, self._last] for value in kept))

    def states(self) -> torch.Tensor:
        """(rows, layers, d): the residual stream after each layer, steering included."""
        return torch.stack([layer[4] for layer in self._layers if layer[4] is not None], 1)

    def measured(self) -> torch.Tensor:
        """(rows, layers, 6), in the order of `NAMES`; NaN where a model has no such gates."""
        out, mha, ffn = (torch.stack([layer[i] for layer in self._layers], 1).float() for i in range(3))  # type: ignore[misc]
        middle = out - ffn
        before = middle - mha
        gates = [layer[3] for layer in self._layers]
        ratio = out.new_full(out.shape[:2], math.nan)
        for layer, gate in enumerate(gates):
            if gate is not None:
                ratio[:, layer] = (gate > 0).float().mean(-1)
        cosine = torch.nn.functional.cosine_similarity
        return torch.stack(
            [
                cosine(before, middle, dim=-1),
                cosine(middle, out, dim=-1),
                mha.norm(dim=-1) / before.norm(dim=-1),
                ffn.norm(dim=-1) / middle.norm(dim=-1),
                divergence(mha, ffn),
                ratio,
            ],
            -1,
        )


def residual(sums: torch.Tensor, rows: int) -> dict[str, list[float | None] | None]:
    """The `residual` readout: means over `rows` rows, by layer. sums: (layers, 6)."""
    means = (sums / max(rows, 1)).T.tolist()
    return {name: [None if math.isnan(x) else x for x in values] for name, values in zip(NAMES, means, strict=True)}
