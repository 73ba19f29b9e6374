"""PAI's amplification of attention to images: scores s of image tokens become s + alpha * |s| before the softmax, in the
prompt's last row and in every generated token's (Liu et al. 2024, "Paying More Attention to Image", section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from steering.interventions.contrast import Pai  # which builds prompts, for which there must be attention


class AmplifyRows:
    """The amplification of one forward pass.

    alpha: (layers, rows), 0 where a row is not amplified. images: (rows, columns), 1 on the columns of images. last: (rows,)
    which query is amplified, in a prefill; -1 where none is. asked: (rows, 1, 1, 1) bool, the rows that are amplified.
    """

    def __init__(self, alpha: torch.Tensor, images: torch.Tensor, last: torch.Tensor | None = None):
        self.alpha = alpha
        self.images = images
        self.last = last
        self.asked = alpha.any(0)[:, None, None, None]

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Amplified scores (rows, heads, n, columns), before the mask. queries: (rows, n), which queries these are, in a
        prefill."""
        gain = self.alpha[layer][:, None, None, None] * self.images[:, None, None, : scores.shape[-1]]
        if queries is not None and self.last is not None:
            gain = gain * (queries == self.last[:, None])[:, None, :, None]
        return torch.addcmul(scores, gain, scores.abs())


class AmplifySlots:
    """The amplification of every slot, none where nothing was asked for."""

    def __init__(self, slots: int, length: int, layers: int, device: torch.device):
        self.alpha = torch.zeros(slots, layers, device=device)
        self.images = torch.zeros(slots, length, device=device)

    def place(self, slot: int, pai: Pai | None, columns: torch.Tensor) -> None:
        """Write a sequence's settings into its slot. columns: (k,), of the prompt's images."""
        self.alpha[slot] = 0
        self.images[slot] = 0
        if pai is not None:
            self.alpha[slot, pai.first_layer :] = pai.amplify
            self.images[slot, columns.to(self.images.device)] = 1

    def move(self, source: int, target: int) -> None:
        """Copy a slot's settings to another slot."""
        for tensor in (self.alpha, self.images):
            tensor[target] = tensor[source]

    def rows(
        self, slots: slice | list[int], pais: Sequence[Pai | None], last: torch.Tensor | None = None
    ) -> AmplifyRows | None:
        """The amplification of a forward pass on some slots, None where none of them asks for any."""
        if all(pai is None for pai in pais):
            return None
        return AmplifyRows(self.alpha[slots].T, self.images[slots], last)
