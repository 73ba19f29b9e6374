"""A batch of answers over paged caches, step by step as vLLM runs it, and attention by itself from whole keys."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from helmsight_vllm.answer import Answer
from helmsight_vllm.looks import Span
from helmsight_vllm.plan import Attention as Labels
from helmsight_vllm.plan import Plan
from helmsight_vllm.table import AdditionTable
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm import _custom_ops as ops

LAYERS, SPANS = 2, 5


class FlashInferImpl(TritonAttentionImpl):
    """FlashInfer's package is for GPUs; what the reader needs of its class is as Triton's, but for the metadata."""


class CPUAttentionBackendImpl(TritonAttentionImpl):
    """The class of CPUs by name, whose window is a number."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sliding_window = self.sliding_window[0] + 1 or -1


IMPLS = {
    impl.__name__: impl for impl in (FlashAttentionImpl, TritonAttentionImpl, FlashInferImpl, CPUAttentionBackendImpl)
}


@dataclass(frozen=True)
class Case:
    """A model's attention, a backend's class, and how its cache lies in memory."""

    backend: str = "FlashAttentionImpl"
    layout: str = "NHD"
    heads: int = 8
    shared: int = 2
    width: int = 32
    block: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    cap: float = 0.0
    sinks: bool = False
    seed: int = 0
    prompts: tuple[int, ...] = (70, 33, 5, 48, 16)
    chunk: int = 40
    decoded: int = 6


@dataclass
class Batch:
    """Answers with drawn queries and keys, (layers, tokens, heads, width), that a backend would compute of their tokens."""

    case: Case
    answers: list[Answer] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, self.drawn = self.case, torch.Generator().manual_seed(self.case.seed)
        table = AdditionTable(LAYERS, 4, len(case.prompts), torch.float32, torch.device("cpu"))
        blocks = sum(-(-(length + case.decoded) // case.block) for length in case.prompts)
        free = (torch.randperm(blocks + 3, generator=self.drawn) + 1).tolist()
        for number, length in enumerate(case.prompts):
            labels = torch.randint(-1, SPANS, (length,), generator=self.drawn).numpy()
            labels[-1] = SPANS - 1
            rows = {"question": [(length // 2, length - 1)], "anchor": [(0, 3), (length - 2, length)]}
            plan = Plan(str(number), length, np.zeros(length, np.int64), ["", ""], attention=Labels(labels, rows, True))
            self.answers.append(Answer(plan, table, LAYERS, 4))
            total = length + case.decoded
            shape = LAYERS, total, case.heads, case.width
            self.queries.append(torch.randn(shape, generator=self.drawn).to(case.dtype))
            keys = torch.randn(*shape[:2], case.shared, case.width, generator=self.drawn)
            self.keys.append(keys.to(case.dtype))
            self.tables.append([free.pop() for _ in range(-(-total // case.block))])
        self.caches = caches(case, blocks + 4)
        self.layers = {number: self._layer(cache) for number, cache in enumerate(self.caches)}

    def steps(self) -> Iterator[tuple[list[Span], list[torch.Tensor], SimpleNamespace]]:
        """Yield for each step its spans, queries of each layer, and metadata, when the keys are in the caches.

        Answers begin one after another, and their order in the batch changes.
        """
        case, at, rng = self.case, [0] * len(self.answers), np.random.default_rng(self.case.seed)
        while any(place < length + case.decoded for place, length in zip(at, case.prompts, strict=True)):
            begun = [number for number in range(len(at)) if number == 0 or at[number - 1] > 0]
            running = [number for number in begun if at[number] < case.prompts[number] + case.decoded]
            spans, chosen, first = list[Span](), list[tuple[int, slice]](), 0
            for place, number in enumerate(rng.permutation(running).tolist()):
                left = case.prompts[number] - at[number]
                count = min(left, int(rng.integers(1, case.chunk))) if left > 0 else 1
                stop, answer = at[number] + count, self.answers[number]
                looked = answer.looks_at(max(at[number], answer.counted), stop)
                spans.append(Span(answer, place, first, at[number], stop, looked))
                chosen.append((number, slice(at[number], stop)))
                at[number], first = stop, first + count
            padding = torch.full((LAYERS, 3, case.heads, case.width), torch.nan, dtype=case.dtype)
            queries = torch.cat([*(self.queries[number][:, part] for number, part in chosen), padding], 1)
            self._write(chosen)
            yield spans, list(queries), self._meta(chosen)
            for span in spans:
                span.answer.counted = span.stop

    def _layer(self, cache: torch.Tensor) -> Attention:
        case = self.case
        impl = IMPLS[case.backend](
            case.heads, case.width, case.width**-0.5, case.shared, None, case.window, "auto", case.cap or None
        )
        if case.sinks:
            impl.sinks = nn.Parameter(torch.randn(case.heads, generator=self.drawn).to(case.dtype), requires_grad=False)
        layer = object.__new__(Attention)
        nn.Module.__init__(layer)
        builder = type("Builder", (), {"build": lambda self, prefix, common: SimpleNamespace()})
        layer.impl, layer.kv_cache, layer.isa = impl, cache, "vec"
        layer.attn_backend = SimpleNamespace(get_builder_cls=lambda: builder)
        for name in ("_q_scale", "_k_scale", "_v_scale"):
            setattr(layer, name, torch.ones(()))
        return layer

    def _slots(self, number: int, part: slice) -> torch.Tensor:
        positions = torch.arange(part.start, part.stop)
        return (
            torch.tensor(self.tables[number])[positions // self.case.block] * self.case.block
            + positions % self.case.block
        )

    def _write(self, chosen: list[tuple[int, slice]]) -> None:
        slots = torch.cat([self._slots(*one) for one in chosen])
        for layer, cache in enumerate(self.caches):
            keys = torch.cat([self.keys[number][layer, part] for number, part in chosen])
            if self.case.layout == "CPU":
                halves = cache.view(*cache.shape[:2], -1, self.case.width).chunk(2, 2)
                ops.cpu_attn_reshape_and_cache(keys, keys, *halves, slots, "vec")
            else:  # as reshape_and_cache_flash of the views that the backends give it
                half, values = cache.transpose(1, 2).split(self.case.width, -1)
                half[slots // self.case.block, slots % self.case.block] = keys
                values[slots // self.case.block, slots % self.case.block] = torch.nan

    def _meta(self, chosen: list[tuple[int, slice]]) -> Any:
        """Return a step's metadata; what is behind an answer's blocks is left over from others, or no block at all."""
        table = torch.randint(-1, 10**6, (len(chosen) + 2, 12), generator=self.drawn, dtype=torch.int32)
        for place, (number, part) in enumerate(chosen):
            used = self.tables[number][: -(-part.stop // self.case.block)]
            table[place, : len(used)] = torch.tensor(used)
        counts = torch.tensor([0, *(part.stop - part.start for _, part in chosen)])
        return SimpleNamespace(
            block_table=table, block_table_tensor=table, slot_mapping=torch.cat([self._slots(*one) for one in chosen]),
            query_start_loc=counts.cumsum(0).int(), seq_lens=torch.tensor([part.stop for _, part in chosen]).int(),
            num_actual_tokens=int(counts.sum()), max_query_len=int(counts.max()),
            max_seq_len=max(part.stop for _, part in chosen),
        )  # fmt: skip

    def expected(self, number: int, layer: int, position: int) -> np.ndarray[Any, Any]:
        """Return the weights of a row (tokens before it and itself,), mean over heads, one head after another in float64."""
        case, impl = self.case, self.layers[layer].impl
        first = 0 if case.window is None else max(0, position + 1 - case.window)
        mean = np.zeros(position + 1)
        for head in range(case.heads):
            keys = self.keys[number][layer, first : position + 1, head * case.shared // case.heads].double().numpy()
            scores = keys @ self.queries[number][layer, position, head].double().numpy() * case.width**-0.5
            if case.cap:
                scores = case.cap * np.tanh(scores / case.cap)
            exponents = np.exp(scores)
            beside = float(impl.sinks[head].double().exp()) if case.sinks else 0.0
            mean[first:] += exponents / (exponents.sum() + beside) / case.heads
        return mean

    def expected_sums(self, number: int, positions: list[int]) -> np.ndarray[Any, Any]:
        """Return sums of weights by label, (layers, positions, labels)."""
        attention = self.answers[number].plan.attention
        assert attention is not None
        sums = np.zeros((LAYERS, len(positions), SPANS))
        for layer in range(LAYERS):
            for place, position in enumerate(positions):
                for token, weight in enumerate(self.expected(number, layer, position)[: len(attention.labels)]):
                    if attention.labels[token] >= 0:
                        sums[layer, place, attention.labels[token]] += weight
        return sums


def caches(case: Case, blocks: int) -> list[torch.Tensor]:
    """Return caches (blocks, heads, block, 2 * width) that lie in memory as vLLM lays them, full of what is no number."""
    heads, block, width = case.shared, case.block, 2 * case.width
    shapes = {
        "HND": ((LAYERS, blocks, heads, block, width), (0, 1, 2, 3, 4)),
        "CPU": ((LAYERS, blocks, heads, block, width), (0, 1, 2, 3, 4)),
        "NHD": ((LAYERS, blocks, block, heads, width), (0, 1, 3, 2, 4)),
        "blocks of all layers": ((blocks, LAYERS, block, heads, width), (1, 0, 3, 2, 4)),
    }
    shape, order = shapes[case.layout]
    return list(torch.full(shape, torch.nan, dtype=case.dtype).permute(order))


def array(measured: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return an array of an answer's measurements."""
    return np.frombuffer(base64.b64decode(measured["data"]), "<f4").reshape(measured["shape"])
