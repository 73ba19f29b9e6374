"""Attention as tensor functions: scores, masks, products, with or without materialised weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from steering.triton.attention import lower_right


class Heads(NamedTuple):
    """The parameters of a layer's attention besides its tensors."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scaled float32 scores of grouped queries (rows, kv_heads, group * n, head_dim), without copies of keys."""
        scores = _products(query, key).mul_(self.scaling)  # in place, because each pass over the scores is expensive
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def masked_scores(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return scores plus mask (rows * kv_heads, 1, columns) in a single pass; for float32 without a cap."""
        keys = key.flatten(0, 1).transpose(1, 2)  # a view: keys are not copied
        flat = torch.baddbmm(mask, query.flatten(0, 1), keys, alpha=self.scaling)
        return flat.view(*query.shape[:3], key.shape[2])


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return products (rows, kv_heads, n, columns) in float32, never rounded to the model's dtype.

    Half precision loses the small weights of models with large scores (IVM paper, appendix C.1), and float16 overflows.

    query: (rows, kv_heads, n, head_dim). key: (rows, kv_heads, columns, head_dim).
    """
    if query.dtype == torch.float32:
        return query @ key.transpose(-1, -2)
    if not query.is_cuda:
        return query.float() @ key.float().transpose(-1, -2)
    keys = key.flatten(0, 1).transpose(1, 2)  # a view: keys are not copied
    flat = torch.bmm(query.flatten(0, 1), keys, out_dtype=torch.float32)
    return flat.view(*query.shape[:3], key.shape[2])


def visible(rows: torch.Tensor, columns: int, window: int | None) -> torch.Tensor:
    """Return the columns that query rows at absolute positions `rows` (...) may attend to, (..., columns) bool."""
    column = torch.arange(columns, device=rows.device)
    visible = column <= rows[..., None]
    return visible if window is None else visible & (column > rows[..., None] - window)


def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mask scores in place; the caller must own them."""
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)


def grouped_scores(heads: Heads, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return scores (rows, heads, n, columns) with grouped keys, which are never repeated."""
    rows, count, n, width = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, width)
    return heads.scores(grouped, key).view(rows, count, n, -1)


def product(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention without materialised weights, where the scores allow it.

    Without a mask it is causal, where queries are the last of the columns.
    """
    if heads.softcap is not None:
        return explicit(heads, query, key, value, mask)
    n, columns = query.shape[2], key.shape[2]
    if mask is None and n != columns:
        alike = query.shape[3] == value.shape[3]  # as that kernel wants them
        if alike and (out := lower_right(query, key, value, heads.scaling)) is not None:
            return out
        mask = visible(torch.arange(columns - n, columns, device=query.device), columns, heads.window)
    causal = mask is None
    single = query.dtype == torch.float32
    if query.is_cuda and (single or mask is not None):  # where heads are grouped, all weights would be materialised
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=heads.scaling, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
    )


def explicit(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention with materialised weights, for soft-capped scores, which SDPA does not support."""
    scores = grouped_scores(heads, query, key)
    if mask is None:
        n, columns = query.shape[2], key.shape[2]
        mask = visible(torch.arange(columns - n, columns, device=query.device), columns, heads.window)
    return weighted(masked(scores, mask).softmax(-1), value)


def weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return weights (rows, heads, n, columns) times grouped values, never repeated: (rows, heads, n, head_dim)."""
    rows, count, n, columns = weights.shape
    grouped = weights.to(value.dtype).reshape(rows, value.shape[1], -1, columns)
    return (grouped @ value).view(rows, count, n, -1)
