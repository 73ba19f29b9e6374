"""Linear layers in float32 whose weights lie in the order in which our own loops read them (`linear.cpp`)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

from steering.loops.operators import operator

BLOCK = 16
"""Outputs whose weights lie side by side."""


def packed_in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """(blocks, width, 16) of a weight (outputs, width); 0 behind the last output."""
    filled = pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK))
    return filled.view(-1, BLOCK, weight.shape[1]).transpose(1, 2).contiguous()


@operator(lambda states, packed, bias, outputs: states.new_empty(*states.shape[:-1], outputs))
def packed_linear(states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """(..., outputs) of states (..., width), float32 and contiguous, by what `packed_in_blocks` gave of a weight; bias:
    (outputs,)."""
    return linear(states, packed.transpose(1, 2).reshape(-1, packed.shape[1])[:outputs], bias)
