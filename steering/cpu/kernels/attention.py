"""Attention of a decode's one query a row, directly from the pool (`attention.cpp`).

In all functions: query (rows, heads, 1, head_dim), float32 and contiguous. key, value: (slots, kv_heads, length, head_dim),
of which row i reads slot i up to its position (rows,), and of these the last `window` columns where that is above 0.
softcap: 0 for none. sinks: (heads,), float32, scores of no column that join each denominator. Whatever the pool's dtype,
computation is in float32.
"""

from __future__ import annotations

import torch

from steering.cpu.kernels.operators import operator
from steering.decoder.kernels import softmax


@operator(lambda query, key, value, *_: query.new_empty(*query.shape[:3], value.shape[3]))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return the output (rows, heads, 1, head_dim)."""
    weights = decode_weights(query, key, positions, None, sinks, scaling, window, softcap, key.shape[2])
    return decode_sums(weights, value, positions, window)


def decode_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    gains: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
    columns: int,
) -> torch.Tensor:
    """Return attention weights (rows, heads, 1, columns), 0 on columns that a row does not see.

    gains: (rows, columns), which change scores s to s + gain * |s|.
    """
    rows, heads, _, width = query.shape
    keys = key[:rows, :, :columns].float()
    scores = query.view(rows, keys.shape[1], -1, width) @ keys.transpose(-1, -2) * scaling
    scores = scores.view(rows, heads, 1, columns)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if gains is not None:
        scores = scores + gains[:, None, None] * scores.abs()
    visible = seen_columns(positions[:, None, None, None], columns, window)
    return softmax(scores.masked_fill(~visible, -torch.inf), None if sinks is None else sinks[:, None])


@operator(lambda weights, value, *_: weights.new_empty(*weights.shape[:3], value.shape[3]))
def decode_sums(weights: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Return sums (rows, heads, 1, head_dim) of values by weights (rows, heads, 1, columns).

    The weights are float32 and contiguous, as `decode_weights` returns them.
    """
    rows, heads, _, columns = weights.shape
    values = value[:rows, :, :columns].float()
    visible = weights.where(seen_columns(positions[:, None, None, None], columns, window), 0.0)
    return (visible.view(rows, values.shape[1], -1, columns) @ values).view(rows, heads, 1, -1)


def seen_columns(last: torch.Tensor, columns: int, window: int) -> torch.Tensor:
    """Return the columns that are seen, (..., columns) bool. last: (..., 1), the last one."""
    column = torch.arange(columns, device=last.device)
    return (column <= last) & (column > last - window) if window > 0 else column <= last
