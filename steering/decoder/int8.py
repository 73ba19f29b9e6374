"""Linear layers in 8-bit integers: weights scaled by output channel, inputs by row at run time (W8A8, symmetric).

This is the "dynamic" quantisation of torchao, whose eager layers take several times as long for the few rows of a decode
step. A weight takes half of bfloat16's memory. A row's result depends only on the row, so that the rest of the batch does
not matter; but rounding is coarse, a hundredth of the sum: an answer may differ from that of the model in float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MOST = 127
LEAST_ROWS, MULTIPLE = 24, 8
"""Least number of rows, and its multiple, in integer products on a GPU, which need more than 16 rows and multiples of 8."""


class Int8Linear(nn.Linear):
    """A linear layer that `prepare` converted from a plain one, and that computes as before until `narrow`."""

    scale: torch.Tensor | None

    def narrow(self) -> None:
        """Round the weights (out, in); only the integers are kept."""
        weight = self.weight.detach().float()
        self.scale = _scale(weight)[:, 0]
        self.weight = nn.Parameter(_round(weight, self.scale[:, None]), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return super().forward(states)
        rows = states.reshape(-1, self.in_features)
        scale = _scale(rows)
        out = _products(_round(rows, scale), self.weight) * scale * self.scale
        if self.bias is not None:
            out += self.bias
        return out.to(states.dtype).view(*states.shape[:-1], self.out_features)


def is_exact(device: torch.device) -> bool:
    """Return True where products of integers on a device are exact.

    A CPU without VNNI adds two of them at a time in 16 bits, in which large ones overflow.
    """
    rows = torch.full((2, 64), MOST, dtype=torch.int8, device=device)
    return all(bool((_products(some, rows) == 64 * MOST**2).all()) for some in (rows[:1], rows))


def prepare(layers: nn.Module) -> None:
    """Convert every linear layer among these, in place, to one that can be narrowed."""
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = Int8Linear
            module.register_buffer("scale", None, persistent=False)


def narrow(layers: nn.Module) -> None:
    """Round the weights of all layers that were prepared and not yet narrowed."""
    for module in layers.modules():
        if isinstance(module, Int8Linear) and module.scale is None:
            module.narrow()


def _scale(rows: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale of each row, (n, 1)."""
    return rows.abs().amax(-1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny * MOST) / MOST


def _round(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(rows / scale).to(torch.int8)


def _products(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sums (n, out), in 32-bit integers, of rows (n, in) by weight (out, in)."""
    if rows.device.type == "cpu":
        return torch._int_mm(rows, weight.t())
    count = max(LEAST_ROWS, -(-len(rows) // MULTIPLE) * MULTIPLE)
    padded: Any = nn.functional.pad(rows, (0, 0, 0, count - len(rows)))
    return torch._int_mm(padded, weight.t())[: len(rows)]
