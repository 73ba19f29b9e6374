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

from steering.accel.cpu.kernels.attention import decode_attention, decode_sums
from steering.accel.cpu.kernels.looks import enhanced_attention, read_attention
from steering.accel.triton.attended import DecodeKernel
from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Placed, Prefill

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


@dataclass
class Decode:
    """A forward pass of one token for each of the first rows of the pool.

    positions: (rows,) the column that each row writes. columns: how many columns are read, at least max(positions) + 1.
    Where few rows need as many, `apart` are those rows with how many each of them reads, and the others read `common`.
    fused: it is compiled, and calls loops of our own. kernel: computes attention on a GPU, each row of its own length.
    """

    pool: KVPool
    positions: torch.Tensor
    columns: int
    hooks: Hooks = NO_HOOKS
    common: int = 0
    apart: tuple[tuple[int, int], ...] = ()
    fused: bool = False
    kernel: DecodeKernel | None = None
    _writes: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)
    _flat_masks: dict[tuple[int | None, int, torch.device], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rows, kv_heads, _, width = key.shape
        keys, values = self.pool.layer(heads.layer, key, value)
        if self.kernel is not None:
            attended = self._accelerated(self.kernel, heads, query, key, value, keys, values)
            if attended is not None:
                return attended
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
                return out.reshape(query.shape)  # kernels lay it out in several ways
        weights = self._weights(heads, grouped, keys, visible)
        if heads.softcap is not None:  # hooks are neutral to the bit in the rows that did not ask for them
            out = weights.to(values.dtype) @ values
        elif hooks:
            asked = functools.reduce(torch.logical_or, [hook.asked for hook in hooks])
            out = torch.where(asked.to(out.device), weights.to(values.dtype) @ values, out)
        for observer in self.hooks.observers:
            observer.decode(heads.layer, weights.view(rows, -1, self.columns).mean(1))
        return out.reshape(query.shape)

    def _accelerated(
        self,
        kernel: DecodeKernel,
        heads: Heads,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the output (rows, heads, 1, head_dim), with the new keys and values written, by the kernel; None where a
        hook does what it does not know."""
        hooks = self.hooks
        gains = hooks.scoring[0].gains(heads.layer, self.columns) if len(hooks.scoring) == 1 else None
        shift = hooks.weighing[0].shift(heads.layer, self.columns) if len(hooks.weighing) == 1 else None
        if (hooks.scoring and gains is None) or (hooks.weighing and shift is None) or value.shape != key.shape:
            return None
        place = (self.positions, heads.scaling, self.columns, heads.layer, heads.window, heads.softcap)
        attended = kernel(query, key, value, keys, values, *place, gains, shift, looks=bool(hooks.observers))
        if attended.effect is not None:
            hooks.weighing[0].shifted(attended.effect)
        for observer in hooks.observers:
            assert attended.means is not None
            observer.decode(heads.layer, attended.means)
        return attended.out[:, :, None]

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
