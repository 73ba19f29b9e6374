"""Attention as tensor functions: scores, masks, products, with or without materialised weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from steering.triton.attention import beside, kept, lower_right, with_log_sums


class Heads(NamedTuple):
    """The parameters of a layer's attention besides its tensors.

    sinks: (heads,), scores of each head that join the softmax's denominator and belong to no column; None without.
    """

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scaled float32 scores of grouped queries (rows, kv_heads, group * n, head_dim), without copies of keys."""
        scores = _products(query, key).mul_(self.scaling)  # in place, because each pass over the scores is expensive
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weights of scores (rows, heads, n, columns)."""
        return softmax(scores, None if self.sinks is None else self.sinks[:, None])

    def fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor | None:
        """Return the output of torch's fused kernels; None where these do not tell what sinks need.

        query: (rows, heads, n, head_dim), or grouped (rows, kv_heads, group, head_dim).
        """
        grouped = query.shape[1] != key.shape[1]
        if self.sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, mask, scale=self.scaling, is_causal=causal, enable_gqa=grouped
            )
        attended = with_log_sums(query, key, value, mask, self.scaling, causal)
        return None if attended is None else beside(*attended, self.sinks.view(query.shape[1], -1))

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


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores (..., columns), which add up to less than 1 beside sinks (...)."""
    weights = scores.softmax(-1)
    return weights if sinks is None else weights.mul_(kept(scores.logsumexp(-1), sinks)[..., None])


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
    if mask is None and (n != columns or heads.sinks is not None):
        alike = query.shape[3] == value.shape[3]  # as that kernel wants them
        if alike and (out := lower_right(query, key, value, heads.scaling, heads.sinks)) is not None:
            return out
    if mask is None and n != columns:
        mask = _causal(heads, query, key)
    single = query.dtype == torch.float32
    if query.is_cuda and (single or mask is not None):  # where heads are grouped, all weights would be materialised
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    out = heads.fused(query, key, value, mask, mask is None)
    return explicit(heads, query, key, value, mask) if out is None else out


def explicit(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention with materialised weights, for what torch's fused kernels do not support, as soft caps."""
    mask = _causal(heads, query, key) if mask is None else mask
    return weighted(heads.weights(masked(grouped_scores(heads, query, key), mask)), value)


def shares_of_sinks(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the share (rows, heads, n, 1) of each query's attention that goes to sinks, however small; None without."""
    if heads.sinks is None:
        return None
    mask = _causal(heads, query, key) if mask is None else mask
    attended = with_log_sums(query, key, key, mask, heads.scaling) if heads.softcap is None else None
    log_sums = masked(grouped_scores(heads, query, key), mask).logsumexp(-1) if attended is None else attended[1]
    return kept(heads.sinks[:, None], log_sums)[..., None]


def _causal(heads: Heads, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask (n, columns) of queries that are the last of the columns."""
    n, columns = query.shape[2], key.shape[2]
    return visible(torch.arange(columns - n, columns, device=query.device), columns, heads.window)


def weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return weights (rows, heads, n, columns) times grouped values, never repeated: (rows, heads, n, head_dim)."""
    rows, count, n, columns = weights.shape
    grouped = weights.to(value.dtype).reshape(rows, value.shape[1], -1, columns)
    return (grouped @ value).view(rows, count, n, -1)
