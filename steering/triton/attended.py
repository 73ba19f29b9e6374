"""The arguments and results of a decode attention kernel. R rows, H heads, D head width."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

SCALE, TRANSFER = 0, 1
"""The codes of two readings of See, as in `interventions.see`, which imports models and so cannot be imported here."""
Bias = tuple[torch.Tensor, torch.Tensor]
"""An addition to a layer's scores: by head (R, H), to those of columns with 1 in (R, length), both float32."""
Enhancement = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A change of a layer's weights.

Masks (R, length, 2), 1 on the columns of images, and of the rest of the prompt; settings (R, layers, 4); reading (R,) uint8,
as in `interventions.see`.
"""


class Attended(NamedTuple):
    """The results of a decode attention kernel.

    out: (R, H, D). means: (R, columns), the mean over heads of the weights, None unless it was requested. effect: (R, 3),
    alpha and the mass on images before and after an enhancement, None without one.
    """

    out: torch.Tensor
    means: torch.Tensor | None
    effect: torch.Tensor | None


DecodeFunction = Callable[..., Attended]
"""The type of `steering.triton.triton_attention.decode_attention`."""
