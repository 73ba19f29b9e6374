"""Short convolutions (LFM2), with their last inputs in slots.

Such a layer makes B, C and x out of its input h, and its output is W (C * conv(B * x)), where each channel is convolved by
itself over a few tokens (Liquid AI 2025, "LFM2 Technical Report").
"""

from __future__ import annotations

from typing import Any

import torch

from steering.recurrent.slots import InSlots, convolved
from steering.recurrent.states import RecurrentPass

PARTS = ("in_proj", "conv", "out_proj", "conv_kernel_size")
"""The parts of such a module, by the names that LFM2 gives them."""


class ShortConvolution(InSlots):
    """The forward pass of a layer's short convolution."""

    def __init__(self, module: Any, layer: int):
        super().__init__(module, layer, module.conv)

    def _run(self, hidden_states: torch.Tensor, states: RecurrentPass) -> torch.Tensor:
        before, behind, value = self._module.in_proj(hidden_states).chunk(3, -1)
        new = (before * value).transpose(1, 2)
        pooled, read, write = states.places(
            self._layer, new.shape[2], lambda: (new.new_empty(1, new.shape[1], self._width),)
        )
        inputs = torch.cat([pooled[0].index_select(0, read), new], 2)
        if write is not None:
            pooled[0].index_copy_(0, write, self._last(states, inputs))
        for part in range(states.cuts):
            states.take(self._layer, part, inputs, self._width)
        return self._out(behind * convolved(self._module.conv, inputs).transpose(1, 2))
