"""A pass of prompts whose positions in the pool are tensors, so that one compiled step serves all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import LayerWeights, PromptKernel, PromptStep


@dataclass
class Placed(PromptStep):
    """A forward pass of prompts as `Prefill`, with positions in the pool as tensors, so that one trace is right for all.

    slots: (rows,). starts: (rows,), the column that each row's first token fills. columns: the number of columns read, at
    least those that are filled. Padding fills columns too, which must be within the slot. kernel: as in `Prefill`.
    """

    pool: KVPool
    slots: torch.Tensor
    starts: torch.Tensor
    columns: int
    hooks: Hooks = NO_HOOKS
    kernel: PromptKernel | None = None
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        kv_heads, n, width = key.shape[1:]
        keys, values = self.pool.layer(heads.layer, key, value)
        filled = self.starts[:, None] + torch.arange(n, device=key.device)  # (rows, n)
        head = self.slots[:, None] * kv_heads + torch.arange(kv_heads, device=key.device)  # (rows, kv_heads)
        written = (head[..., None] * self.pool.length + filled[:, None]).flatten()
        for pooled, new in ((keys, key), (values, value)):
            pooled.view(-1, width).index_copy_(0, written, new.reshape(-1, width))
        attended = grouped = None
        if self.kernel is not None and keys.dtype == torch.float32:
            query, places = query.contiguous(), (self.slots, self.starts)
            attended, grouped = self.kernel(self.hooks, heads, query, keys, values, *places, self.columns)
        if attended is not None and not self.hooks.looks:
            return attended
        if heads.window not in self._masks:
            visible = kernels.visible(filled, self.columns, heads.window)[:, None]
            self._masks[heads.window] = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        keys, values = (pooled[:, :, : self.columns].index_select(0, self.slots) for pooled in (keys, values))
        if self.hooks.looks:  # with grouped heads a compiler finds no simple strides in the weights
            group = query.shape[1] // kv_heads
            keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
        mask = self._masks[heads.window]
        if attended is None:
            return self._attend_with_hooks(heads, query, keys, values, mask)
        return self._apply_weight_hooks(LayerWeights(self, heads, query, keys, mask, grouped), values, attended)
