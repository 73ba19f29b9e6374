"""Linear layers in float32 over weights that lie in the order in which our own loops read them (`linear.cpp`)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

from steering.accel.cpu.kernels.operators import operator

BLOCK = 16
"""Outputs whose weights lie side by side."""
HALVES = (torch.bfloat16, torch.float16)


def narrowest(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight as the half precision that has all its values, which is its checkpoint's; as it is where neither has.
    What a product of few rows takes time for is to read weights."""
    halves = (weight.to(dtype) for dtype in HALVES)
    return next((half for half in halves if torch.equal(half.float(), weight)), weight)


def packed_in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """(blocks, width, 16) of a weight (outputs, width); 0 behind the last output."""
    filled = pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK))
    return filled.view(-1, BLOCK, weight.shape[1]).transpose(1, 2).contiguous()


@operator(lambda states, packed, bias, outputs: states.new_empty(*states.shape[:-1], outputs))
def packed_linear(states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """(..., outputs) of states (..., width), float32 and contiguous, by what `packed_in_blocks` gave of a weight, in float32
    or in half precision; bias: (outputs,) in float32."""
    return linear(states, packed.float().transpose(1, 2).reshape(-1, packed.shape[1])[:outputs], bias)
