"""The one attention function of the language model, over the slot KV pool.

Row i of a decode batch is slot i of the pool, so that decode reads the pool by a view and never gathers. A step object
travels with the forward pass, says whether it is a prefill of some slots or a decode of the first rows, and carries the
hooks of whoever looks at it or changes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, AttentionHook, Hooks, Product
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.devices import sent
from steering.loops.attention import decode_attention, decode_sums
from steering.loops.looks import enhanced_attention, read_attention

NAME = "helmsight"


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
    step: Prefill | Placed | Decode | None = None,
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
        return kernels.explicit(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    return step.attend(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None


class _OfPrompts:
    """What passes of prompts have in common: attention under their hooks."""

    hooks: Hooks
    start: int = 0

    def _hooked(
        self,
        heads: Heads,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The output (rows, heads, n, head_dim) of queries (rows, heads, n, head_dim) of all columns that are given."""
        out = kernels.product(heads, query, key, value, mask)
        if not self.hooks.attention and not self.hooks.observers:
            return out

        weights = functools.partial(self._weights, heads, query, key, mask)
        for observer in self.hooks.observers:
            observer.prefill(heads.layer, weights, key.shape[2])
        wide = functools.cache(lambda: (query.float(), key.float()))
        exact: Product = lambda values: kernels.product(heads, *wide(), values, mask)  # noqa: E731
        for hook in self.hooks.attention:
            changed = hook.product(heads.layer, value, exact)
            if changed is not None:
                out = torch.where(hook.asked.to(out.device), changed.to(out.dtype), out)
                exact = functools.partial(_product_under, hook, heads.layer, exact)
        for hook in self.hooks.attention:
            if hook.queries is not None:
                out = _replaced(
                    out, hook.queries.to(out.device), kernels.weighted(weights(hook.queries.clamp(min=0)), value)
                )
        return out

    def _weights(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, queries: torch.Tensor
    ) -> torch.Tensor:
        """Attention weights (rows, heads, R, columns) of some queries of each prompt, as the hooks make them.

        queries: (rows, R), counted in the chunk.
        """
        columns, asked = key.shape[2], queries
        queries = queries.to(query.device)
        index = queries[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        scores = kernels.grouped_scores(heads, query.gather(2, index), key)
        for hook in self.hooks.scoring:
            scores = hook.scores(heads.layer, scores, asked)
        if mask is None:
            visible = kernels.visible(queries + self.start, columns, None)[:, None]
        else:
            visible = mask.expand(queries.shape[0], -1, -1, -1)
            visible = visible.gather(2, queries[:, None, :, None].expand(-1, 1, -1, columns))
        weights = kernels.masked(scores, visible).softmax(-1)
        for hook in self.hooks.attention:
            weights = hook.weights(heads.layer, weights)
        return weights


@dataclass
class Prefill(_OfPrompts):
    """A forward pass that fills columns start..start+n of some slots, `rows`, one prompt a row, padded on the right.

    Padding writes garbage behind a prompt's end, where decode overwrites every column before it reads it. Where rows begin
    at different columns, `ragged` tells which those are.
    """

    pool: KVPool
    rows: slice
    start: int = 0
    hooks: Hooks = NO_HOOKS
    ragged: Ragged | None = None
    _masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.pool.layer(heads.layer, key, value)
        n = key.shape[2]
        end = self.start + n
        if self.ragged is not None:
            self.ragged.write(keys[self.rows], key)
            self.ragged.write(values[self.rows], value)
            end = self.ragged.columns
        else:
            keys[self.rows, :, self.start : end], values[self.rows, :, self.start : end] = key, value
        if self.start or self.ragged is not None:
            key, value = keys[self.rows, :, :end], values[self.rows, :, :end]
            mask = self._chunk_mask(n, end, heads.window, query.device)
        return self._hooked(heads, query, key, value, mask)

    def _chunk_mask(self, n: int, columns: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(1 or rows, 1, n, columns): causal with an offset, which is_causal cannot say, and within the window."""
        if (window, device) not in self._masks:
            starts = torch.tensor([self.start] if self.ragged is None else self.ragged.starts)
            rows = sent(starts[:, None] + torch.arange(n), device)
            self._masks[window, device] = kernels.visible(rows, columns, window)[:, None]
        return self._masks[window, device]


@dataclass
class Placed(_OfPrompts):
    """A forward pass of prompts as `Prefill`, whose places are tensors, so that the same code is right for all of them.

    slots: (rows,). starts: (rows,), the column that each row's first token fills. columns: how many are read, at least those
    that are filled. Padding fills columns too, which must be a slot's own.
    """

    pool: KVPool
    slots: torch.Tensor
    starts: torch.Tensor
    columns: int
    hooks: Hooks = NO_HOOKS
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        kv_heads, n, width = key.shape[1:]
        keys, values = self.pool.layer(heads.layer, key, value)
        filled = self.starts[:, None] + torch.arange(n, device=key.device)  # (rows, n)
        head = self.slots[:, None] * kv_heads + torch.arange(kv_heads, device=key.device)  # (rows, kv_heads)
        written = (head[..., None] * self.pool.length + filled[:, None]).flatten()
        for pooled, own in ((keys, key), (values, value)):
            pooled.view(-1, width).index_copy_(0, written, own.reshape(-1, width))
        if heads.window not in self._masks:
            seen = kernels.visible(filled, self.columns, heads.window)[:, None]
            self._masks[heads.window] = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, -torch.inf)
        keys, values = (pooled[:, :, : self.columns].index_select(0, self.slots) for pooled in (keys, values))
        if self.hooks.attention or self.hooks.observers:  # grouped, a compiler finds no simple strides in their weights
            group = query.shape[1] // kv_heads
            keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
        return self._hooked(heads, query, keys, values, self._masks[heads.window])


@dataclass
class Ragged:
    """Where the rows of a prefill begin and how many tokens each has, where they do not begin at one column."""

    starts: list[int]
    lengths: list[int]
    _places: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """How many columns its queries may see."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    def write(self, pooled: torch.Tensor, own: torch.Tensor) -> None:
        """Put own (rows, kv_heads, n, head_dim), but for its padding, into pooled (rows, kv_heads, length, head_dim)."""
        if own.device not in self._places:
            real = torch.arange(own.shape[2]) < torch.tensor(self.lengths)[:, None]
            row, at = real.nonzero().unbind(1)
            column = torch.tensor(self.starts)[row] + at
            self._places[own.device] = (sent(row, own.device), sent(at, own.device), sent(column, own.device))
        row, at, column = self._places[own.device]
        pooled[row, :, column] = own[row, :, at]


def _product_under(hook: AttentionHook, layer: int, exact: Product, value: torch.Tensor) -> torch.Tensor:
    """`exact` as a hook changes it, for the hooks behind it."""
    changed = hook.product(layer, value, exact)
    assert changed is not None
    return torch.where(hook.asked.to(changed.device), changed, exact(value))


def _replaced(out: torch.Tensor, queries: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """out (rows, heads, n, head_dim) with own (rows, heads, R, head_dim) at some queries (rows, R); not in rows of -1."""
    index = queries.clamp(min=0)[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[3])
    return out.scatter(2, index, torch.where((queries >= 0)[:, None, :, None], own, out.gather(2, index)))


@dataclass
class Decode:
    """A forward pass of one token for each of the first rows of the pool.

    positions: (rows,) the column that each row writes. columns: how many columns are read, at least max(positions) + 1.
    Where few rows need as many, `apart` are those rows with how many each of them reads, and the others read `common`.
    fused: it is compiled, and calls loops of our own.
    """

    pool: KVPool
    positions: torch.Tensor
    columns: int
    hooks: Hooks = NO_HOOKS
    common: int = 0
    apart: tuple[tuple[int, int], ...] = ()
    fused: bool = False
    _writes: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)
    _flat_masks: dict[tuple[int | None, int, torch.device], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rows, kv_heads, _, width = key.shape
        keys, values = self.pool.layer(heads.layer, key, value)
        written = self._written(kv_heads, key.device)
        keys.view(-1, width).index_copy_(0, written, key.reshape(-1, width))
        values.view(-1, width).index_copy_(0, written, value.reshape(-1, width))
        if self.fused:
            return self._looped(heads, query, keys, values)
        keys, values = keys[:rows, :, : self.columns], values[:rows, :, : self.columns]  # views
        grouped = query.reshape(rows, kv_heads, -1, width)  # (rows, kv_heads, group, head_dim)
        hooks, visible = self.hooks.attention, self._mask(heads.window, query)
        # The answer's own path is the same whatever is observed and whatever its neighbours ask for; what else is computed
        # replaces it only in the rows that a hook changes.
        if heads.softcap is None:
            out = self._product(heads, grouped, keys, values, visible)
            if not hooks and not self.hooks.observers:
                return out.view(query.shape)
        weights = self._weights(heads, grouped, keys, visible)
        if heads.softcap is not None:  # hooks are neutral to the bit in the rows that did not ask for them
            out = weights.to(values.dtype) @ values
        elif hooks:
            asked = functools.reduce(torch.logical_or, [hook.asked for hook in hooks])
            out = torch.where(asked.to(out.device), weights.to(values.dtype) @ values, out)
        for observer in self.hooks.observers:
            observer.decode(heads.layer, weights.view(rows, -1, self.columns).mean(1))
        return out.view(query.shape)

    def _looped(self, heads: Heads, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The output (rows, heads, 1, head_dim) of queries alike, by our own loops over a layer's pool."""
        query, hooks = query.float().contiguous(), self.hooks
        given, how = (query, keys, values, self.positions), (heads.scaling, heads.window or 0, heads.softcap or 0.0)
        if not hooks.attention and not hooks.observers:
            return decode_attention(*given, *how).to(values.dtype)
        gains = hooks.scoring[0].gains(heads.layer, self.columns) if len(hooks.scoring) == 1 else None
        shift = hooks.weighing[0].shift(heads.layer, self.columns) if len(hooks.weighing) == 1 else None
        if (hooks.scoring and gains is None) or (hooks.weighing and shift is None):
            rows, heads_of, _, width = query.shape
            grouped, near = query.view(rows, keys.shape[1], -1, width), keys[:rows, :, : self.columns]
            weights = self._weights(heads, grouped, near, self._mask(heads.window, query)).view(rows, heads_of, 1, -1)
            out = decode_sums(weights.contiguous(), values, self.positions, heads.window or 0)
            means = weights[:, :, 0].mean(1)
        elif shift is None:
            out, means = read_attention(*given, gains, *how, self.columns)
        else:
            out, means, told = enhanced_attention(*given, gains, *shift, heads.layer, *how, self.columns)
            hooks.weighing[0].shifted(told)
        for observer in hooks.observers:
            observer.decode(heads.layer, means)
        return out.to(values.dtype)

    def _product(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """The output (rows, kv_heads, group, head_dim) of queries alike, each row of the columns that it is to read."""

        def product(rows: slice, columns: int) -> torch.Tensor:
            near = (rows, slice(None), slice(columns))
            return F.scaled_dot_product_attention(
                query[rows], key[near], value[near], visible[rows][..., :columns], scale=heads.scaling
            )

        if not self.apart:
            return F.scaled_dot_product_attention(query, key, value, visible, scale=heads.scaling)
        out = product(slice(None), self.common)
        for row, columns in self.apart:
            one = slice(row, row + 1)
            out[one] = product(one, columns)
        return out

    def _weights(self, heads: Heads, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, kv_heads, group, columns) as the hooks make them. visible: (rows, 1, 1, columns)."""
        shape, by_head = (*query.shape[:3], self.columns), (query.shape[0], -1, 1, self.columns)
        if not self.hooks.scoring and heads.softcap is None and query.dtype == torch.float32:  # in one pass
            scores = heads.masked_scores(query, key, self._flat_mask(heads.window, key.shape[1], visible))
        else:
            scores = heads.scores(query, key)
            for hook in self.hooks.scoring:
                scores = hook.scores(heads.layer, scores.view(by_head), None)
            scores = scores.view(shape) + visible
        weights = scores.softmax(-1)
        for hook in self.hooks.attention:
            weights = hook.weights(heads.layer, weights.view(by_head))
        return weights.view(shape)

    def _written(self, kv_heads: int, device: torch.device) -> torch.Tensor:
        """(rows * kv_heads,) where each row's new key goes in a layer's pool seen as (slots * kv_heads * length)."""
        if (kv_heads, device) not in self._writes:
            heads = torch.arange(self.positions.shape[0] * kv_heads, device=device)
            written = heads * self.pool.length + self.positions.to(device).repeat_interleave(kv_heads)
            self._writes[kv_heads, device] = written
        return self._writes[kv_heads, device]

    def _mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """(rows, 1, 1, columns) additive: 0 on the columns a row may see, -inf elsewhere."""
        device = query.device
        if (window, device) not in self._masks:
            visible = kernels.visible(self.positions.to(device), self.columns, window)[:, None, None]
            zeros = torch.zeros(visible.shape, dtype=query.dtype, device=device)
            self._masks[window, device] = zeros.masked_fill_(~visible, -torch.inf)
        return self._masks[window, device]

    def _flat_mask(self, window: int | None, kv_heads: int, visible: torch.Tensor) -> torch.Tensor:
        """(rows * kv_heads, 1, columns), the same for products of a batch of heads."""
        place = (window, kv_heads, visible.device)
        if place not in self._flat_masks:
            self._flat_masks[place] = visible.expand(-1, kv_heads, -1, -1).reshape(visible.shape[0] * kv_heads, 1, -1)
        return self._flat_masks[place]
