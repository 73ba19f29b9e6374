"""What is read of a decode's attention weights, and See's change of them (`looks.cpp`)."""

from __future__ import annotations

import torch

from steering.loops.operators import operator


@operator(
    lambda weights, spans: (
        spans.new_empty(weights[0].shape[0], len(weights), weights[0].shape[2]),
        spans.new_empty(weights[0].shape[0], len(weights), spans.shape[2]),
    )
)
def attention_looks(weights: list[torch.Tensor], spans: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over heads (rows, layers, columns) of each layer's weights, and its sums by span (rows, layers, spans).

    weights: of each layer (rows, heads, columns), float32 and contiguous. spans: (rows, length, spans), 1 where a column
    belongs to a span.
    """
    means = torch.stack([one.mean(1) for one in weights], 1)
    return means, means @ spans[:, : means.shape[2]]


@operator(lambda weights, *_: (torch.empty_like(weights), weights.new_empty(weights.shape[0], 3)))
def enhanced(
    weights: torch.Tensor,
    masks: torch.Tensor,
    settings: torch.Tensor,
    transfer: torch.Tensor,
    layer: int,
    least: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as See enhances them (SAGE paper, section 5.1, equations 3 and 4), and for each row (rows, 3) what alpha was,
    and the mass on images before and after, means over heads.

    weights: (rows, heads, 1, columns), float32 and contiguous. masks: (rows, length, 2), 1 on the columns of images, and of
    the rest of the prompt. settings: (rows, layers, 4): alpha is the first, plus second + third * mass on images, kept
    between 0 and the fourth. transfer: (rows,) bool, whether the mass is taken from the text, where images have at least
    `least` of it, or all are scaled.
    """
    masses = weights[:, :, 0] @ masks[:, : weights.shape[3]]  # (rows, heads, 2)
    seen, read = masses.unbind(-1)
    fixed, start, fall, most = settings[:, layer].unbind(-1)
    decay = seen.mean(1)
    alpha = fixed + (start + decay * fall).clamp(min=0).minimum(most)
    moving, by_head = transfer[:, None], alpha[:, None]
    moved = by_head * (seen >= least)
    up = torch.where(moving, moved * read / seen.clamp(min=least), by_head)
    down = moved * moving
    total = torch.where(moving, 1.0, 1 + by_head * seen)
    visual, text = masks[:, None, : weights.shape[3]].unbind(-1)  # (rows, 1, columns)
    gain = (1 + up[..., None] * visual - down[..., None] * text) / total[..., None]
    after = (seen * (1 + up) / total).mean(1)
    return weights * gain[:, :, None], torch.stack([alpha, decay, after], -1)
