"""The one attention function of the language model. It owns the slot KV pool and does the captures.

Row i of a decode batch is slot i of the pool, so that decode reads the pool by a view and never gathers. A step object
travels with the forward pass and says whether it is a prefill of some slots or a decode of the first rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from steering.interventions.amplify import AmplifyRows
from steering.interventions.see import SeeRows
from steering.residual import DecodeResidual, PrefillResidual

NAME = "helmsight"
QUESTIONS, MODALITY, ANCHORS = range(3)
"""Groups of captured prefill rows: the question's that see every image, those of them that see the text context too, the
last image's."""
CAPTURE_ROWS = 128
"""Prefill rows whose attention weights exist at once while they are reduced."""


def register() -> None:
    """Make `attn_implementation={"text_config": NAME}` known to transformers; the mask function must come with it,
    or padding and window masks silently vanish."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    step: Prefill | Decode | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (rows, heads, n, head_dim), key and value (rows, kv_heads, n, head_dim) -> (rows, n, heads, head_dim).

    Without a step it is transformers' own SDPA, so the patched model still runs as a plain one.
    """
    if step is None and softcap is None:
        kwargs.pop("dropout", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = Heads(module.layer_idx, scaling, sliding_window, softcap)  # type: ignore[arg-type]
    if step is None:
        return _explicit(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    return step.attend(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None


class Heads(NamedTuple):
    """What one layer's attention needs besides its tensors."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Scaled float32 scores; grouped queries (rows, kv_heads, group * n, head_dim) meet their keys without copies."""
        scores = _products(query, key).mul_(self.scaling)  # in place: each pass over them costs
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


class KVPool:
    """Keys and values of every slot: per layer two tensors (slots, kv_heads, length, head_dim), made at first use."""

    def __init__(self, slots: int, length: int):
        self.slots = slots
        self.length = length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of a layer, shaped after the first key and value that it gets."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, because a masked column of garbage could be NaN and 0 * NaN is NaN."""
        shape = (self.slots, like.shape[1], self.length, like.shape[3])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        # numpy's zeros are pages that the system commits when they are first written: an idle slot costs no memory.
        raw = np.zeros((*shape[:-1], shape[-1] * like.element_size()), np.uint8)
        return torch.from_numpy(raw).view(like.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one slot to another."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot, so that what a faulty sequence left cannot leak into its successor through 0 * NaN."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slot].zero_()


@dataclass
class PrefillCapture:
    """Attention of chosen query rows, reduced on the device to sums over spans of columns, mean over heads.

    spans: (rows, columns, S), 1 where a column belongs to a span. rows: (rows, R), query indices in the chunk. weights:
    (rows, R, 3), 1 on those of each group. sums: (layers, rows, 3, S), to which each layer adds. patches: where wanted
    (layers, rows, columns), to which each layer adds the weights of the rows of `QUESTIONS`.

    last: (rows,), each prompt's last row, where the chunk holds it, which is reduced apart: See and Generate rest on it, and
    must not depend on what else is read. last_sums: (layers, rows, S). maps: where wanted (rows, columns), to which the
    layers from `maps_from` on add its weights. last_patches: where wanted (layers, rows, columns).
    """

    spans: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor
    patches: torch.Tensor | None = None
    last: torch.Tensor | None = None
    last_sums: torch.Tensor | None = None
    maps: torch.Tensor | None = None
    maps_from: int = 0
    last_patches: torch.Tensor | None = None


class DecodeCapture:
    """Attention of the one query of each row, mean over heads; a layer writes it."""

    def __init__(self, layers: int, rows: int, columns: int, device: torch.device):
        self.means = torch.empty(layers, rows, columns, device=device)


@dataclass
class Prefill:
    """A forward pass that fills columns start..start+n of some slots, one prompt a row, padded on the right.

    Padding writes garbage behind a prompt's end, where decode overwrites every column before it reads it.
    """

    pool: KVPool
    slots: list[int]
    residual: PrefillResidual | DecodeResidual
    start: int = 0
    capture: PrefillCapture | None = None
    see: SeeRows | None = None
    amplify: AmplifyRows | None = None
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.pool.layer(heads.layer, key, value)
        n = key.shape[2]
        end = self.start + n
        keys[self.slots, :, self.start : end], values[self.slots, :, self.start : end] = key, value
        if self.start:  # only a single prompt comes in chunks
            slot = self.slots[0]
            key, value = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
            mask = self._chunk_mask(n, heads.window, query.device)
        if self.capture is not None:
            self._capture(self.capture, heads, query, key, mask)

        out = _product(heads, query, key, value, mask)
        if self.see is not None and self.see.generated:
            every = torch.arange(n, device=query.device).expand(len(query), n)
            own = _weighted(self._weights(heads, query, key, mask, every), value)
            return torch.where(self.see.asked, own, out)
        if self.see is not None and heads.layer < self.see.depth:
            exact = functools.partial(_product, heads, query.float(), key.float(), mask=mask)
            enhanced = self.see.attend(heads.layer, value.float(), exact)
            out = torch.where(self.see.asked, enhanced.to(out.dtype), out)
        if self.amplify is not None and self.amplify.last is not None:
            last = self.amplify.last.clamp(min=0)[:, None]
            own = _weighted(self._weights(heads, query, key, mask, last), value)
            index = last[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[3])
            amplified = (self.amplify.last >= 0)[:, None, None, None]
            out = out.scatter(2, index, torch.where(amplified, own, out.gather(2, index)))
        return out

    def _weights(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """Attention weights (rows, heads, R, columns) of some queries of each prompt, interventions included.

        rows: (rows, R), query indices in the chunk.
        """
        columns = key.shape[2]
        index = rows[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        scores = _grouped_scores(heads, query.gather(2, index), key)
        if self.amplify is not None:
            scores = self.amplify.scores(heads.layer, scores, rows)
        if mask is None:
            visible = _visible(rows + self.start, columns, None)[:, None]
        else:
            visible = mask.expand(len(rows), -1, -1, -1).gather(2, rows[:, None, :, None].expand(-1, 1, -1, columns))
        weights = _masked(scores, visible).softmax(-1)
        if self.see is not None and (self.see.generated or heads.layer < self.see.depth):
            weights = self.see.enhance(heads.layer, weights)
        return weights

    def _chunk_mask(self, n: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(1, 1, n, start + n): causal with an offset, which is_causal cannot say, and within the window."""
        if window not in self._masks:
            self._masks[window] = _visible(
                torch.arange(self.start, self.start + n, device=device), self.start + n, window
            )[None, None]
        return self._masks[window]

    def _capture(
        self, capture: PrefillCapture, heads: Heads, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        columns = key.shape[2]
        spans = capture.spans[:, :columns]
        for first in range(0, capture.rows.shape[1], CAPTURE_ROWS):
            rows = capture.rows[:, first : first + CAPTURE_ROWS]  # (rows, R)
            weights = self._weights(heads, query, key, mask, rows).mean(1)  # (rows, R, columns)
            groups = capture.weights[:, first : first + CAPTURE_ROWS].transpose(1, 2)  # (rows, 3, R)
            capture.sums[heads.layer] += groups @ (weights @ spans)
            if capture.patches is not None:
                capture.patches[heads.layer, :, :columns] += (groups[:, QUESTIONS, None] @ weights)[:, 0]
        if capture.last is None or capture.last_sums is None:
            return
        weights = self._weights(heads, query, key, mask, capture.last[:, None]).mean(1)  # (rows, 1, columns)
        capture.last_sums[heads.layer] = (weights @ spans)[:, 0]
        if capture.maps is not None and heads.layer >= capture.maps_from:
            capture.maps[:, :columns] += weights[:, 0]
        if capture.last_patches is not None:
            capture.last_patches[heads.layer, :, :columns] = weights[:, 0]


@dataclass
class Decode:
    """A forward pass of one token for each of the first rows of the pool.

    positions: (rows,) the column that each row writes. columns: how many columns are read, at least max(positions) + 1.
    """

    pool: KVPool
    positions: torch.Tensor
    columns: int
    residual: DecodeResidual
    capture: DecodeCapture | None = None
    see: SeeRows | None = None
    amplify: AmplifyRows | None = None
    _writes: dict[int, torch.Tensor] = field(default_factory=dict)
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _flat_masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rows, kv_heads, _, width = key.shape
        keys, values = self.pool.layer(heads.layer, key, value)
        written = self._written(kv_heads)
        keys.view(-1, width).index_copy_(0, written, key.reshape(-1, width))
        values.view(-1, width).index_copy_(0, written, value.reshape(-1, width))
        keys, values = keys[:rows, :, : self.columns], values[:rows, :, : self.columns]  # views
        grouped = query.reshape(rows, kv_heads, -1, width)  # (rows, kv_heads, group, head_dim)
        visible = self._mask(heads.window, query.dtype)
        # The answer's own path is the same whatever is observed and whatever its neighbours ask for; what else is computed
        # replaces it only in the rows that See or PAI changes.
        if heads.softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, visible, scale=heads.scaling)
            if self.capture is None and self.see is None and self.amplify is None:
                return out.view(query.shape)
        if self.amplify is None and heads.softcap is None and query.dtype == torch.float32:
            scores = self._masked_scores(heads, grouped, keys, visible)
        else:
            scores = heads.scores(grouped, keys)
            if self.amplify is not None:
                scores = self.amplify.scores(heads.layer, scores)
            scores = scores.add_(visible)
        weights = scores.softmax(-1)
        if self.see is not None:  # which tells heads from queries
            weights = self.see.enhance(heads.layer, weights.view(rows, -1, 1, self.columns)).view_as(weights)
        if heads.softcap is not None:  # See and PAI are neutral to the bit in the rows that did not ask for them
            out = weights.to(values.dtype) @ values
        elif asked := [one.asked for one in (self.amplify, self.see) if one is not None]:
            out = torch.where(functools.reduce(torch.logical_or, asked), weights.to(values.dtype) @ values, out)
        if self.capture is not None:
            torch.mean(weights.view(rows, -1, self.columns), 1, out=self.capture.means[heads.layer])
        return out.view(query.shape)

    def _written(self, kv_heads: int) -> torch.Tensor:
        """(rows * kv_heads,) where each row's new key goes in a layer's pool seen as (slots * kv_heads * length)."""
        if kv_heads not in self._writes:
            heads = torch.arange(len(self.positions) * kv_heads, device=self.positions.device)
            self._writes[kv_heads] = heads * self.pool.length + self.positions.repeat_interleave(kv_heads)
        return self._writes[kv_heads]

    def _masked_scores(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Scaled and masked scores in one pass, because each takes a part of a short step."""
        rows, kv_heads, group, _ = query.shape
        if (heads.window, kv_heads) not in self._flat_masks:
            flat = visible.expand(-1, kv_heads, -1, -1).reshape(rows * kv_heads, 1, -1)
            self._flat_masks[heads.window, kv_heads] = flat
        mask = self._flat_masks[heads.window, kv_heads]
        keys = key.flatten(0, 1).transpose(1, 2)  # a view: keys are not copied
        return torch.baddbmm(mask, query.flatten(0, 1), keys, alpha=heads.scaling).view(rows, kv_heads, group, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(rows, 1, 1, columns) additive: 0 on the columns a row may see, -inf elsewhere."""
        if window not in self._masks:
            visible = _visible(self.positions, self.columns, window)[:, None, None]
            zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            self._masks[window] = zeros.masked_fill_(~visible, -torch.inf)
        return self._masks[window]


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Products (rows, kv_heads, n, columns) in float32, never rounded to the model's dtype: half precision loses the small
    weights of models with large scores (IVM paper, appendix C.1), and float16 overflows.

    query: (rows, kv_heads, n, head_dim). key: (rows, kv_heads, columns, head_dim).
    """
    if query.dtype == torch.float32:
        return query @ key.transpose(-1, -2)
    if not query.is_cuda:
        return query.float() @ key.float().transpose(-1, -2)
    keys = key.flatten(0, 1).transpose(1, 2)  # a view: keys are not copied
    flat = torch.bmm(query.flatten(0, 1), keys, out_dtype=torch.float32)
    return flat.view(*query.shape[:3], key.shape[2])


def _visible(rows: torch.Tensor, columns: int, window: int | None) -> torch.Tensor:
    """(..., columns) bool: the columns that query rows at absolute positions `rows` (...) may attend to."""
    column = torch.arange(columns, device=rows.device)
    visible = column <= rows[..., None]
    return visible if window is None else visible & (column > rows[..., None] - window)


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores that nobody else holds, masked in place."""
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)


def _grouped_scores(heads: Heads, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scores (rows, heads, n, columns) with grouped keys, which are never repeated."""
    rows, count, n, width = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, width)
    return heads.scores(grouped, key).view(rows, count, n, -1)


def _product(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention without materialised weights, where the scores allow it; causal without a mask."""
    if heads.softcap is not None:
        return _explicit(heads, query, key, value, mask)
    causal = mask is None
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=heads.scaling, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
    )


def _explicit(
    heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention with materialised weights, for the soft-capped scores that SDPA does not know."""
    scores = _grouped_scores(heads, query, key)
    if mask is None:
        n, columns = query.shape[2], key.shape[2]
        mask = _visible(torch.arange(columns - n, columns, device=query.device), columns, heads.window)
    return _weighted(_masked(scores, mask).softmax(-1), value)


def _weighted(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(rows, heads, n, head_dim): weights (rows, heads, n, columns) times grouped values, which are never repeated."""
    rows, count, n, columns = weights.shape
    grouped = weights.to(value.dtype).reshape(rows, value.shape[1], -1, columns)
    return (grouped @ value).view(rows, count, n, -1)
