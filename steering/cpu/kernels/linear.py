"""Linear layers in float32 over weights in the memory order of our own loops (`linear.cpp`)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

from steering.cpu.kernels.operators import operator

BLOCK = 16
"""Outputs whose weights are adjacent in memory."""
HALVES = (torch.bfloat16, torch.float16)


def narrowest(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 weight in the half precision that holds all its values, which is its checkpoint's, if any.

    The time of a product of few rows is that of reading weights.
    """
    halves = (weight.to(dtype) for dtype in HALVES)
    return next((half for half in halves if torch.equal(half.float(), weight)), weight)


def packed_in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Return (blocks, width, 16) of a weight (outputs, width); 0 after the last output."""
    filled = pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK))
    return filled.view(-1, BLOCK, weight.shape[1]).transpose(1, 2).contiguous()


@operator(lambda states, packed, bias, outputs: states.new_empty(*states.shape[:-1], outputs))
def packed_linear(states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Return (..., outputs) of states (..., width), float32 and contiguous.

    packed: from `packed_in_blocks`, in float32 or in half precision; bias: (outputs,) in float32.
    """
    return linear(states, packed.float().transpose(1, 2).reshape(-1, packed.shape[1])[:outputs], bias)
