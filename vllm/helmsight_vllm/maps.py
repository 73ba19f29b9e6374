"""Attention maps over pictures' patches of single rows, for masks: more patches than the labels of `attention` can name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm import envs


@dataclass
class MapLook:
    """A row whose attention to some of its answer's columns is read in some layers.

    place: the answer's in the batch. row: the row's in the step. length: the tokens that it sees. columns: (patches,). sums:
    (patches,), over layers, of the mean over this rank's heads.
    """

    place: int
    row: int
    length: int
    columns: torch.Tensor
    layers: Sequence[int]
    sums: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(self.columns))


class MapReader:
    """Reads maps with the kernel and with values of its own, in as many calls as it takes."""

    def __init__(self) -> None:
        self.looks: list[MapLook] = []
        self._values: torch.Tensor | None = None

    def read(self, number: int, impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, meta: Any) -> None:
        for look in self.looks:
            if number in look.layers:
                self._read(look, impl, layer, query, kv_cache, meta)

    def _read(
        self, look: MapLook, impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, meta: Any
    ) -> None:
        if self._values is None or self._values.shape != kv_cache.shape or self._values.dtype != kv_cache.dtype:
            self._values = torch.zeros_like(kv_cache)
        keys, values = halves(self._values)
        block, width = kv_cache.shape[2], impl.head_size
        blocks = meta.block_table[look.place : look.place + 1].contiguous()
        positions = torch.arange(look.length)
        slots = blocks[0, positions // block].long() * block + positions % block
        lengths = torch.tensor([look.length], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        scheduled = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=width, seq_lens=lengths,
            dtype=query.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )  # fmt: skip
        chosen = query[look.row : look.row + 1].contiguous()
        own_keys, _ = halves(kv_cache)
        for first in range(0, len(look.columns), width):
            columns = look.columns[first : first + width]
            one_hot = torch.zeros(look.length, kv_cache.shape[1], width, dtype=kv_cache.dtype)
            one_hot[columns, :, torch.arange(len(columns))] = 1.0
            ops.cpu_attn_reshape_and_cache(one_hot, one_hot, keys, values, slots, layer.isa)
            out = torch.empty(1, impl.num_heads, width, dtype=query.dtype)
            ops.cpu_attention_with_kv_cache(
                query=chosen, key_cache=own_keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lengths,
                scale=impl.scale, causal=True, alibi_slopes=impl.alibi_slopes, sliding_window=impl.sliding_window,
                block_table=blocks, softcap=impl.logits_soft_cap, scheduler_metadata=scheduled, s_aux=impl.sinks,
            )  # fmt: skip
            look.sums[first : first + width] += out[0].float().mean(0)[: len(columns)]


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a layer's cache (blocks, heads, block, 2 * width), as the kernel takes them."""
    blocks, heads, block, _ = cache.shape
    keys, values = cache.view(blocks, heads, block * 2, -1).chunk(2, dim=2)
    return keys, values
