"""What a decode attention kernel is given and returns. R rows, H heads, D head width."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Enhancement = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A change of a layer's weights: masks (R, length, 2), 1 on the columns of images, and of the rest of the prompt;
settings (R, layers, 4); transfer (R,) bool, as `interventions.see` has them."""


class Attended(NamedTuple):
    """out: (R, H, D). means: (R, columns), the mean over heads of the weights, None unless it was asked for. effect: (R, 3),
    alpha and the mass on images before and after an enhancement, None without one."""

    out: torch.Tensor
    means: torch.Tensor | None
    effect: torch.Tensor | None


DecodeFunction = Callable[..., Attended]
"""`steering.accel.triton.triton_attention.decode_attention`."""
