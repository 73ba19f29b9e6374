"""From sums of attention over spans to shares of the prompt's parts."""

from __future__ import annotations

import torch

from steering.spans import CONTEXT, FIRST_IMAGE, SYSTEM


def attention_shares(sums: torch.Tensor) -> torch.Tensor:
    """(..., 3): shares of vision, system and user text, normalised over the three, mean over layers.

    sums: (..., layers, spans). Attention by span and step (SAGE paper, section 3). A layer whose window holds no such
    span does not count; NaN where none does.
    """
    vision = sums[..., FIRST_IMAGE:].sum(-1)
    user = sums[..., CONTEXT:FIRST_IMAGE].sum(-1)
    parts = torch.stack([vision, sums[..., SYSTEM], user], dim=-1)
    return (parts / parts.sum(-1, keepdim=True)).nanmean(-2)
