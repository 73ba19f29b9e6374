"""Attention of tokens that are tried behind rows of the slot KV pool, several behind each, without a write to the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.recurrent.states import RecurrentPass


@dataclass
class Candidates:
    """A forward pass of `each` tokens behind every one of some slots, none of which sees another.

    Its rows are those of the first slot, then those of the second. slots: (n,). positions: (n,), the column behind each
    slot's last token, which is in the pool. columns: how many columns are read, at least max(positions) + 1. Of the hooks,
    those that read attention are called, with the tokens' own values alone.
    """

    pool: KVPool
    slots: torch.Tensor
    positions: torch.Tensor
    each: int
    columns: int
    hooks: Hooks = NO_HOOKS
    _places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.pool.layer(heads.layer, key, value)
        slots, positions = self._on(query.device)
        past_keys, past_values = keys[slots, :, : self.columns], values[slots, :, : self.columns]
        count, kv_heads, _, width = past_keys.shape
        own = (count, self.each, kv_heads, -1, width)
        # (n, kv_heads, each, group, head_dim): all queries of a slot read its keys in one product.
        queries = query.reshape(own).transpose(1, 2)
        shape = (*queries.shape[:-1], self.columns)
        scores = heads.scores(queries.flatten(2, 3), past_keys).view(shape)
        own_scores = heads.scores(queries.flatten(0, 1), key.reshape(own).transpose(1, 2).flatten(0, 1))
        at = positions.view(-1, 1, 1, 1, 1).expand(*shape[:-1], 1)
        scores = scores.scatter(-1, at, own_scores.view(*shape[:-1], 1))
        visible = kernels.visible(positions, self.columns, heads.window)[:, None, None, None]
        sinks = None if heads.sinks is None else heads.sinks.view(kv_heads, 1, -1)
        weights = kernels.softmax(scores.masked_fill_(~visible, -torch.inf), sinks)
        own_weight = weights.gather(-1, at).to(values.dtype)
        past = weights.to(values.dtype).scatter(-1, at, 0.0).flatten(2, 3) @ past_values
        own_values = value.reshape(*own[:-1], values.shape[3]).transpose(1, 2)  # latent attention has others than keys
        out = past.view(*queries.shape[:-1], -1) + own_weight * own_values
        by_row = weights.transpose(1, 2).reshape(count * self.each, -1, 1, self.columns)
        for hook in self.hooks.readers(heads.layer):
            hook.read(heads.layer, by_row, value)
        return out.transpose(1, 2).reshape(*query.shape[:3], -1)

    @cached_property
    def recurrent(self) -> RecurrentPass:
        slots, starts = (tensor.repeat_interleave(self.each) for tensor in (self.slots, self.positions))
        return RecurrentPass(self.pool.states, slots, starts, kept=False)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and positions on a layer's device."""
        if device not in self._places:
            self._places[device] = self.slots.to(device), self.positions.to(device)
        return self._places[device]
