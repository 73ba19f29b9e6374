"""The attention function of the language model, over the slot KV pool.

Row i of a decode batch is slot i of the pool, so that decode reads the pool by a view and never gathers. A step object
travels with the forward pass: it is a prefill of some slots or a decode of the first rows, and carries the hooks that
observe or change the pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.recurrent.states import RecurrentPass

NAME = "helmsight"


def register() -> None:
    """Make `attn_implementation={"text_config": NAME}` known to transformers.

    The mask function must be registered too, or padding and window masks silently vanish.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    step: AttentionStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: query (rows, heads, n, head_dim), key and value (rows, kv_heads, n, head_dim) -> (rows, n, heads, head_dim).

    Without a step it is transformers' own SDPA, so the patched model still runs as a plain one. softcap, s_aux: None, or as
    `Heads` has a soft cap and sinks, for models whose attention SDPA cannot compute.
    """
    if step is None and softcap is None and s_aux is None:
        kwargs.pop("dropout", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = Heads(module.layer_idx, scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    if step is None:
        return kernels.product(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    return step.attend(heads, query, key, value, attention_mask).transpose(1, 2).contiguous(), None


class AttentionStep(Protocol):
    """Computes the attention of each layer of one forward pass. `recurrent` are the states of the other layers."""

    hooks: Hooks

    @property
    def recurrent(self) -> RecurrentPass: ...

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output (rows, heads, n, head_dim) of one layer."""


class DecodeKernel(Protocol):
    """Computes a layer's attention in a decode without torch's operations."""

    def __call__(
        self, step: Decode, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output (rows, heads, 1, head_dim), or None where a hook is unknown to it, or reads the layer's weights.

        New keys and values are written to the pool, and all hooks are called.
        """

    def adopted(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a pass in the kernel's own form."""


@dataclass
class Decode:
    """A forward pass of one token for each of the first rows of the pool.

    positions: (rows,) the column that each row writes. columns: how many columns are read, at least max(positions) + 1.
    Where only a few rows need so many, `apart` lists those rows with the number of columns of each, and the others read
    `common`. kernel: computes attention where it supports all hooks. kept: False for tokens that are only tried, behind
    which recurrent states are not kept; their keys and values are overwritten.
    """

    pool: KVPool
    positions: torch.Tensor
    columns: int
    hooks: Hooks = NO_HOOKS
    common: int = 0
    apart: tuple[tuple[int, int], ...] = ()
    kernel: DecodeKernel | None = None
    kept: bool = True
    _writes: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)
    _flat_masks: dict[tuple[int | None, int, torch.device], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if self.kernel is not None and (attended := self.kernel(self, heads, query, key, value)) is not None:
            return attended
        rows, kv_heads, _, width = key.shape
        keys, values = self.write(heads.layer, key, value)
        keys, values = keys[:rows, :, : self.columns], values[:rows, :, : self.columns]  # views
        grouped = query.reshape(rows, kv_heads, -1, width)  # (rows, kv_heads, group, head_dim)
        shape = (*query.shape[:3], values.shape[3])  # latent attention has values of another width than keys
        hooks, visible = self.hooks.attention, self.mask(heads.window, query)
        # The output of a row is the same whatever is observed and whatever other rows request; other results replace it only
        # in the rows that a hook changes.
        out = self._product(heads, grouped, keys, values, visible) if heads.softcap is None else None
        if out is not None and not hooks and not self.hooks.observers:
            return out.reshape(shape)  # kernels differ in its memory layout
        weights = self.weights(heads, grouped, keys, visible)
        if out is None:  # hooks are neutral to the bit in the rows that did not ask for them
            out = weights.to(values.dtype) @ values
        elif hooks:
            active = functools.reduce(torch.logical_or, [hook.asked for hook in hooks])
            out = torch.where(active.to(out.device), weights.to(values.dtype) @ values, out)
        for hook in self.hooks.readers(heads.layer):
            hook.read(heads.layer, weights.view(rows, -1, 1, self.columns), values)
        for observer in self.hooks.observers:
            observer.decode(heads.layer, weights.view(rows, -1, self.columns).mean(1))
        return out.reshape(shape)

    @cached_property
    def recurrent(self) -> RecurrentPass:
        slots = torch.arange(len(self.positions), device=self.positions.device)
        return RecurrentPass(self.pool.states, slots, self.positions, kept=self.kept)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values (rows, kv_heads, 1, head_dim) to the pool; return its two tensors."""
        keys, values = self.pool.layer(layer, key, value)
        written = self._new_key_index(key.shape[1], key.device)
        for pooled, new in ((keys, key), (values, value)):
            pooled.view(-1, new.shape[3]).index_copy_(0, written, new.reshape(-1, new.shape[3]))
        return keys, values

    def _product(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output (rows, kv_heads, group, head_dim) of `Heads.fused`, over the columns that each row reads."""

        def product(rows: slice, columns: int) -> torch.Tensor | None:
            near = (rows, slice(None), slice(columns))
            return heads.fused(query[rows], key[near], value[near], visible[rows][..., :columns])

        if not self.apart:
            return heads.fused(query, key, value, visible)
        if (out := product(slice(None), self.common)) is None:
            return None
        for row, columns in self.apart:
            rows = slice(row, row + 1)
            out[rows] = product(rows, columns)  # type: ignore[assignment]
        return out

    def weights(self, heads: Heads, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Return the weights (rows, kv_heads, group, columns), changed by the hooks. visible: (rows, 1, 1, columns)."""
        shape, by_head = (*query.shape[:3], self.columns), (query.shape[0], -1, 1, self.columns)
        if not self.hooks.scoring and heads.softcap is None and query.dtype == torch.float32:  # in one pass
            scores = heads.masked_scores(query, key, self._flat_mask(heads.window, key.shape[1], visible))
        else:
            scores = heads.scores(query, key)
            for hook in self.hooks.scoring:
                scores = hook.scores(heads.layer, scores.view(by_head), None)
            scores = scores.view(shape) + visible
        weights = heads.weights(scores.view(by_head))
        for hook in self.hooks.attention:
            weights = hook.weights(heads.layer, weights)
        return weights.view(shape)

    def _new_key_index(self, kv_heads: int, device: torch.device) -> torch.Tensor:
        """Return the index of each row's new key, (rows * kv_heads,), in a layer's (slots * kv_heads * length) pool."""
        if (kv_heads, device) not in self._writes:
            heads = torch.arange(self.positions.shape[0] * kv_heads, device=device)
            written = heads * self.pool.length + self.positions.to(device).repeat_interleave(kv_heads)
            self._writes[kv_heads, device] = written
        return self._writes[kv_heads, device]

    def mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """Return an additive mask (rows, 1, 1, columns): 0 on the columns a row may see, -inf elsewhere."""
        device = query.device
        if (window, device) not in self._masks:
            visible = kernels.visible(self.positions.to(device), self.columns, window)[:, None, None]
            zeros = torch.zeros(visible.shape, dtype=query.dtype, device=device)
            self._masks[window, device] = zeros.masked_fill_(~visible, -torch.inf)
        return self._masks[window, device]

    def _flat_mask(self, window: int | None, kv_heads: int, visible: torch.Tensor) -> torch.Tensor:
        """Return the same mask as (rows * kv_heads, 1, columns), for products of a batch of heads."""
        place = (window, kv_heads, visible.device)
        if place not in self._flat_masks:
            self._flat_masks[place] = visible.expand(-1, kv_heads, -1, -1).reshape(visible.shape[0] * kv_heads, 1, -1)
        return self._flat_masks[place]
