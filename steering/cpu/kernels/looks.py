"""The readings of a decode's attention weights, and See's change of them, beside the output (`looks.cpp`).

Arguments shared with `kernels.attention` have the same meaning here.
"""

from __future__ import annotations

import torch

from steering.cpu.kernels.attention import decode_sums, decode_weights
from steering.cpu.kernels.operators import operator
from steering.interventions.see import factors


def _outputs(query: torch.Tensor, value: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[0], columns)


@operator(lambda query, key, value, *others: _outputs(query, value, others[-1]))
def read_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    gains: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (rows, heads, 1, head_dim), and the weights' mean over heads (rows, columns)."""
    weights = decode_weights(query, key, positions, gains, sinks, scaling, window, softcap, columns)
    return decode_sums(weights, value, positions, window), weights[:, :, 0].mean(1)


@operator(lambda query, key, value, *others: (*_outputs(query, value, others[-1]), query.new_empty(query.shape[0], 3)))
def enhanced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    gains: torch.Tensor | None,
    masks: torch.Tensor,
    settings: torch.Tensor,
    reading: torch.Tensor,
    layer: int,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same for weights enhanced by See, and the effect that `enhanced` returns."""
    weights = decode_weights(query, key, positions, gains, sinks, scaling, window, softcap, columns)
    weights, masses = enhanced(weights, masks, settings, reading, layer)
    return decode_sums(weights, value, positions, window), weights[:, :, 0].mean(1), masses


def enhanced(
    weights: torch.Tensor, masks: torch.Tensor, settings: torch.Tensor, reading: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights enhanced by See (SAGE paper, section 5.1, equations 3 and 4), and its effect (rows, 3).

    The effect is alpha, and the mass on images before and after, means over heads.

    weights: (rows, heads, 1, columns). masks: (rows, length, 2), 1 on the columns of images, and of the rest of the prompt.
    settings: (rows, layers, 4), float32 and contiguous: alpha is the first, plus second + third * mass on images, clamped to
    0 and the fourth. reading: (rows,) uint8, an index of `see.READINGS`.
    """
    masses = weights[:, :, 0] @ masks[:, : weights.shape[3]]  # (rows, heads, 2)
    image_mass, text_mass = masses.unbind(-1)
    fixed, start, fall, most = settings[:, layer].unbind(-1)
    decay = image_mass.mean(1)
    alpha = fixed + (start + decay * fall).clamp(min=0).minimum(most)
    up, down, total = factors(alpha[:, None], image_mass, text_mass, reading[:, None])
    visual, text = masks[:, None, : weights.shape[3]].unbind(-1)  # (rows, 1, columns)
    gain = (1 + up[..., None] * visual - down[..., None] * text) / total[..., None]
    after = (image_mass * (1 + up) / total).mean(1)
    return weights * gain[:, :, None], torch.stack([alpha, decay, after], -1)
