"""Attention by a second call of the backend's own kernel, over values of our own: that of CPUs.

The kernel runs on the chosen rows, over the layer's keys and a value cache that holds, for each token, the one-hot vector of
its label. Its output is then the sum of each label's weights, by head. One such cache of values serves all layers of a form,
because labels are the same in each. Windows, soft caps and sinks are the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from helmsight_vllm.looks import Look, MapLook, Pass, Span
from vllm import _custom_ops as ops
from vllm import envs

Kept = dict[tuple[torch.Size, torch.dtype], torch.Tensor]
"""Values of our own by the form of the caches that they fit."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


def readable(attention: Any) -> bool:
    """Return True for attention of a backend whose kernel takes values of our own: that of CPUs, with plain keys."""
    impl = attention.impl
    plain = isinstance(impl, CPUAttentionBackendImpl) and impl.kv_cache_dtype in DTYPES
    return plain and type(attention) is Attention  # others regroup the batch


class KernelMethod:
    """Reads attention with the kernel; maps of more patches than a head is wide take several calls."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._values: Kept = {}
        self._mapped: Kept = {}

    def plain(self) -> bool:
        return True

    def begin(self, spans: Sequence[Span], looks: Sequence[Look], width: int) -> None:
        self._looks = looks
        self._calls: dict[int, dict[str, Any]] = {}  # by the metadata of a group of layers, which has its own blocks
        rows = [np.arange(span.first, span.first + span.stop - span.start) for span in spans]
        self._rows = torch.from_numpy(np.concatenate(rows))
        self._labels = torch.from_numpy(
            np.concatenate([span.answer.labels_at(span.start, span.stop) for span in spans])
        )

    def sum_into(self, sums: torch.Tensor, of: Pass) -> None:
        call = self._calls.get(id(of.meta))
        if call is None:
            call = self._calls[id(of.meta)] = self._prepared(of)
        if self._looks:
            chosen = of.query[call["rows"]].contiguous()
            sums[:] = self._called(of, chosen, **call["call"])[:, : sums.shape[1]]

    def map(self, look: MapLook, of: Pass) -> torch.Tensor:
        cache, width = of.cache, of.impl.head_size
        keys, values = halves(_like(cache, self._mapped))
        blocks = of.meta.block_table[look.place : look.place + 1].contiguous()
        positions = torch.arange(look.length)
        slots = blocks[0, positions // cache.shape[2]].long() * cache.shape[2] + positions % cache.shape[2]
        lengths, starts = (torch.tensor(values, dtype=torch.int32) for values in ([look.length], [0, 1]))
        scheduled = _scheduled(of, starts, lengths)
        chosen = of.query[look.row : look.row + 1].contiguous()
        found = torch.empty(len(look.columns))
        for first in range(0, len(look.columns), width):
            columns = look.columns[first : first + width]
            one_hot = torch.zeros(look.length, cache.shape[1], width, dtype=cache.dtype)
            one_hot[columns, :, torch.arange(len(columns))] = 1.0
            ops.cpu_attn_reshape_and_cache(one_hot, one_hot, keys, values, slots, of.layer.isa)
            mean = self._called(
                of, chosen, value_cache=values, query_start_loc=starts, seq_lens=lengths, block_table=blocks,
                scheduler_metadata=scheduled,
            )  # fmt: skip
            found[first : first + width] = mean[0, : len(columns)]
        return found

    def _called(self, of: Pass, chosen: torch.Tensor, **call: Any) -> torch.Tensor:
        """Call the kernel on chosen rows; return its output's mean over heads (rows, width)."""
        impl = of.impl
        out = torch.empty(len(chosen), impl.num_heads, impl.head_size, dtype=chosen.dtype)
        keys, _ = halves(of.cache)
        ops.cpu_attention_with_kv_cache(
            query=chosen, key_cache=keys, output=out, scale=impl.scale, causal=True, alibi_slopes=impl.alibi_slopes,
            sliding_window=impl.sliding_window, softcap=impl.logits_soft_cap, s_aux=impl.sinks, **call,
        )  # fmt: skip
        return out.float().mean(1)

    def _prepared(self, of: Pass) -> dict[str, Any]:
        """Write the one-hot values of the step's tokens, and return the arguments of the second calls."""
        cache, meta = of.cache, of.meta
        keys, values = halves(_like(cache, self._values))
        one_hot = torch.zeros(len(self._labels), cache.shape[1], of.impl.head_size, dtype=cache.dtype)
        known = (self._labels >= 0).nonzero()[:, 0]
        one_hot[known, :, self._labels[known]] = 1.0
        ops.cpu_attn_reshape_and_cache(one_hot, one_hot, keys, values, meta.slot_mapping[self._rows], of.layer.isa)
        if not self._looks:
            return {}
        counts = torch.tensor([0, *(look.stop - look.start for look in self._looks)], dtype=torch.int32)
        starts = counts.cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([look.stop for look in self._looks], dtype=torch.int32)
        rows = [torch.arange(look.first, look.first + look.stop - look.start) for look in self._looks]
        table = meta.block_table[torch.tensor([look.place for look in self._looks])].contiguous()
        call = {
            "value_cache": values, "query_start_loc": starts, "seq_lens": lengths, "block_table": table,
            "scheduler_metadata": _scheduled(of, starts, lengths),
        }  # fmt: skip
        return {"rows": torch.cat(rows), "call": call}


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a layer's cache (blocks, heads, block, 2 * width), as the kernel takes them."""
    blocks, heads, block, _ = cache.shape
    keys, values = cache.view(blocks, heads, block * 2, -1).chunk(2, dim=2)
    return keys, values


def _like(cache: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Return the kept values that fit a layer's cache, at first zeros; layers with wider heads have their own."""
    form = cache.shape, cache.dtype
    if form not in kept:
        kept[form] = torch.zeros_like(cache)
    return kept[form]


def _scheduled(of: Pass, starts: torch.Tensor, lengths: torch.Tensor) -> Any:
    impl, isa = of.impl, of.layer.isa
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths), num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=impl.head_size,
        seq_lens=lengths, dtype=of.query.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )  # fmt: skip
