"""Attention by span of the prompt, of chosen rows, without reading weights.

The backend's own paged kernel runs a second time on the chosen rows, over the layer's keys and a value cache that holds, for
each token, the one-hot vector of its label. Its output is then the sum of each label's weights, by head. One such cache of
values serves all layers, because labels are the same in each. Windows, soft caps and sinks are the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from helmsight_vllm.maps import MapReader, halves
from helmsight_vllm.plan import Ints
from vllm import _custom_ops as ops
from vllm import envs


class Look(NamedTuple):
    """Consecutive rows of an answer whose attention is read in a step.

    place: the answer's in the batch. first: the first row's in the step. start, stop: their positions.
    """

    place: int
    first: int
    start: int
    stop: int


@dataclass
class Step:
    """The attention that is read in a step.

    rows, labels: the step's tokens whose one-hot values are written. sums: (layers, looked rows, labels), the result.
    """

    looks: Sequence[Look]
    rows: torch.Tensor
    labels: torch.Tensor
    sums: torch.Tensor
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The arguments of the second calls, by the metadata that a group of layers shares: each group has its own blocks."""


def readable(attention: Any) -> bool:
    """Return True for attention of a backend whose kernel takes values of our own: that of CPUs, with plain keys."""
    impl = attention.impl
    return isinstance(impl, CPUAttentionBackendImpl) and impl.kv_cache_dtype in (
        "auto",
        "float32",
        "bfloat16",
        "float16",
    )


class AttentionReader:
    """Reads attention in every layer of this rank. `step` is what to read now, None for nothing."""

    def __init__(self, layers: dict[int, Any]):
        self.step: Step | None = None
        self.maps = MapReader()
        self._values: torch.Tensor | None = None
        for number, attention in layers.items():
            self._extend(attention.impl, number)

    def begin(self, looks: Sequence[Look], rows: Ints, labels: Ints, layers: int, width: int) -> None:
        """Read these rows in the next pass; `labels` (k,) of the tokens at `rows` (k,), of `width` different ones."""
        looked = sum(look.stop - look.start for look in looks)
        self.step = Step(looks, torch.from_numpy(rows), torch.from_numpy(labels), torch.zeros(layers, looked, width))

    def end(self) -> Step | None:
        """Return what was read, and read nothing any more."""
        step, self.step = self.step, None
        return step

    def _extend(self, impl: Any, number: int) -> None:
        """Replace an implementation's class by one that reads behind its own work."""
        plain, reader = type(impl), self

        class Read(plain):  # type: ignore[misc, valid-type]
            def forward(
                self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
                *args: Any, **kwargs: Any,
            ) -> Any:  # fmt: skip
                out = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                if attn_metadata is not None:
                    if reader.step is not None:
                        reader._read(reader.step, number, self, layer, query, kv_cache, attn_metadata)
                    reader.maps.read(number, self, layer, query, kv_cache, attn_metadata)
                return out

        Read.__name__ = plain.__name__
        impl.__class__ = Read

    def _read(
        self, step: Step, number: int, impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, meta: Any
    ) -> None:
        call = step.calls.get(id(meta))
        if call is None:
            call = step.calls[id(meta)] = self._prepared(step, impl, layer, query, kv_cache, meta)
        if not step.looks:
            return
        chosen = query[call["rows"]].contiguous()
        out = torch.empty(len(chosen), impl.num_heads, impl.head_size, dtype=query.dtype)
        keys, _ = halves(kv_cache)
        ops.cpu_attention_with_kv_cache(
            query=chosen, key_cache=keys, output=out, scale=impl.scale, causal=True, alibi_slopes=impl.alibi_slopes,
            sliding_window=impl.sliding_window, softcap=impl.logits_soft_cap, s_aux=impl.sinks, **call["call"],
        )  # fmt: skip
        step.sums[number] = out.float().mean(1)[:, : step.sums.shape[2]]

    def _prepared(
        self, step: Step, impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, meta: Any
    ) -> dict[str, Any]:
        """Write the one-hot values of the step's tokens, and return the arguments of the second calls."""
        if self._values is None or self._values.shape != kv_cache.shape or self._values.dtype != kv_cache.dtype:
            self._values = torch.zeros_like(kv_cache)
        keys, values = halves(self._values)
        one_hot = torch.zeros(len(step.labels), kv_cache.shape[1], impl.head_size, dtype=kv_cache.dtype)
        known = (step.labels >= 0).nonzero()[:, 0]
        one_hot[known, :, step.labels[known]] = 1.0
        ops.cpu_attn_reshape_and_cache(one_hot, one_hot, keys, values, meta.slot_mapping[step.rows], layer.isa)
        if not step.looks:
            return {"rows": None}
        counts = torch.tensor([0, *(look.stop - look.start for look in step.looks)], dtype=torch.int32)
        starts = counts.cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([look.stop for look in step.looks], dtype=torch.int32)
        scheduled = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths), num_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=impl.head_size,
            seq_lens=lengths, dtype=query.dtype, query_start_loc=starts, causal=True,
            sliding_window_size=-1, isa=layer.isa, enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )  # fmt: skip
        rows = [torch.arange(look.first, look.first + look.stop - look.start) for look in step.looks]
        table = meta.block_table[torch.tensor([look.place for look in step.looks])].contiguous()
        call = {
            "value_cache": values, "query_start_loc": starts, "seq_lens": lengths, "block_table": table,
            "scheduler_metadata": scheduled,
        }  # fmt: skip
        return {"rows": torch.cat(rows), "call": call}
