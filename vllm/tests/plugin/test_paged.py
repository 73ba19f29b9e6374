"""Attention from paged keys in the forms of GPU backends: sums and maps are those of whole keys, one head after another."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helmsight_vllm import paged
from helmsight_vllm.attention import AttentionReader, method_of
from helmsight_vllm.faults import Faults
from helmsight_vllm.looks import MapLook, Pass
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from plugin.paging import IMPLS, SPANS, Batch, Case, array

CASES = {
    "FlashAttention": Case(),
    "HND": Case(layout="HND", heads=4, shared=4, dtype=torch.float16),
    "blocks of all layers": Case(layout="blocks of all layers", heads=7, shared=1, dtype=torch.bfloat16),
    "Triton": Case("TritonAttentionImpl", heads=14, shared=2, window=9, cap=2.0, sinks=True),
    "window over blocks": Case(window=37, heads=4, shared=1, dtype=torch.bfloat16),
    "sinks": Case("TritonAttentionImpl", "HND", sinks=True, dtype=torch.float16, width=64),
    "soft cap": Case(cap=0.7, width=80, block=48),
    "FlashInfer": Case("FlashInferImpl", "HND", window=20, heads=8, shared=8),
    "CPU": Case("CPUAttentionBackendImpl", "CPU", window=11, block=32),
}
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
    parallel_config=SimpleNamespace(use_ubatching=False),
    cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
)


@pytest.fixture(autouse=True)
def torch_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose torch; backends' own work, which takes GPUs, is left out."""
    monkeypatch.setenv("HELMSIGHT_ATTENTION", "torch")
    for impl in IMPLS.values():
        monkeypatch.setattr(impl, "forward", lambda self, *args, **kwargs: None)


def reader_of(batch: Batch) -> AttentionReader:
    method = method_of(batch.layers, CONFIG, torch.device("cpu"))
    assert isinstance(method, paged.PagedMethod)
    assert method.plain()
    return AttentionReader(batch.layers, method, Faults())


def run(batch: Batch, reader: AttentionReader, maps: bool = False) -> Iterator[tuple[list[MapLook], list[Any]]]:
    """Run all steps, and yield of each the maps of its last rows, and its spans."""
    for spans, queries, common in batch.steps():
        reader.begin(spans, SPANS)
        looks = [
            MapLook(
                span.answer,
                span.place,
                span.first + span.stop - span.start - 1,
                span.stop,
                torch.arange(0, span.stop, 2),
                [1],
            )
            for span in spans
        ]
        reader.maps = looks if maps else []
        for number, layer in batch.layers.items():
            # FlashInfer's own metadata has no block table, unless it is kept when it is built.
            built = batch.case.backend != "FlashInferImpl"
            meta = common if built else layer.attn_backend.get_builder_cls()().build(0, common)
            layer.impl.forward(layer, queries[number], None, None, layer.kv_cache, meta, None, output_scale=None)
        reader.end()
        yield looks, spans


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_whole_keys(name: str) -> None:
    case = CASES[name]
    batch = Batch(case)
    assert sum(1 for _ in run(batch, reader_of(batch))) > 8
    for number, length in enumerate(case.prompts):
        taken = batch.answers[number].taken(case.decoded)["attention"]
        groups = {
            "question": [*range(length // 2, length - 1)],
            "anchor": sorted({*range(min(3, length)), length - 2, length - 1}),
            "last": [length - 1],
            "generated": [*range(length, length + case.decoded)],
        }
        for group, positions in groups.items():
            expected = batch.expected_sums(number, positions)
            assert np.abs(array(taken[group]) - expected.sum(1)).max() < 1e-6 * len(positions), (number, group)
            if group == "generated":
                assert np.abs(array(taken["steps"]).swapaxes(0, 1) - expected).max() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_maps_are_those_of_whole_keys(name: str) -> None:
    batch = Batch(CASES[name])
    compared = 0
    for looks, spans in run(batch, reader_of(batch), maps=True):
        for look, span in zip(looks, spans, strict=True):
            expected = batch.expected(int(span.answer.plan.number), 1, span.stop - 1)[look.columns]
            assert np.abs(look.sums.numpy() - expected).max() < 1e-6
            compared += 1
    assert compared > 30


def test_memory_is_bounded_by_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small budget, a prompt's rows are read a few at a time, with the same results."""
    sizes = list[int]()

    def results(budget: int) -> list[np.ndarray[Any, Any]]:
        monkeypatch.setattr(paged, "BUDGET", budget)
        plain, sizes[:] = paged.weights, []

        def weights(query: torch.Tensor, keys: torch.Tensor, unseen: torch.Tensor, *args: Any) -> torch.Tensor:
            sizes.append(unseen.numel() * query.shape[2])
            return plain(query, keys, unseen, *args)

        batch = Batch(Case(prompts=(150, 90, 120), chunk=100))
        with monkeypatch.context() as patched:
            patched.setattr(paged, "weights", weights)
            list(run(batch, reader_of(batch)))
        return [array(answer.taken(6)["attention"]["question"]) for answer in batch.answers]

    whole, largest, calls = results(2**25), max(sizes), len(sizes)
    pieces = results(8_000)
    # The last block's keys behind a row are computed with it.
    assert max(sizes) <= 8_000 * 1.25 < largest
    assert len(sizes) > 2 * calls
    assert all(np.abs(one - two).max() < 1e-5 for one, two in zip(whole, pieces, strict=True))


class Operations(TorchDispatchMode):
    """Notes the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_nothing_and_has_no_loop_over_tokens() -> None:
    """No operation of a layer needs a number on the host, and twelve answers take no more than one does, but for a copy."""
    counts = []
    for prompts in ((40,), (40,) * 12):
        batch = Batch(Case(prompts=prompts, decoded=60, chunk=100))
        reader = reader_of(batch)
        for spans, queries, meta in batch.steps():
            if len(spans) == len(prompts) and all(span.stop > 40 for span in spans):
                reader.begin(spans, SPANS)
                for number, layer in batch.layers.items():
                    with Operations() as seen:
                        reader._read(number, number, Pass(layer.impl, layer, queries[number], layer.kv_cache, meta))
                    assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"} & {
                        *seen.names
                    }
                counts.append(len(seen.names))  # of the last layer, which finds masks and tables there
                reader.end()
                break
    one, many = counts
    assert many <= one + 1 < 40


@pytest.mark.parametrize(
    "name", ["quantised", "subclass", "other layer", "spread", "alibi", "micro-batches", "fast", "window"]
)
def test_what_is_not_plain_is_not_readable(name: str) -> None:
    batch, config = Batch(Case()), CONFIG
    layer = batch.layers[1]
    if name == "quantised":
        layer.impl.kv_cache_dtype = "fp8_e4m3"
    elif name == "subclass":
        layer.impl.__class__ = type("FlashAttentionDiffKVImpl", (type(layer.impl),), {})
    elif name == "other layer":
        layer.__class__ = type("ChunkedLocalAttention", (Attention,), {})
    elif name == "spread":
        layer.impl.dcp_world_size = 2
    elif name == "alibi":
        layer.impl.alibi_slopes = torch.ones(8)
    else:
        part, field = {
            "micro-batches": ("parallel_config", "use_ubatching"), "fast": ("cache_config", "kv_sharing_fast_prefill"),
            "window": ("model_config", "rswa_window"),
        }[name]  # fmt: skip
        config = SimpleNamespace(
            **{**vars(CONFIG), part: SimpleNamespace(**{**vars(getattr(CONFIG, part)), field: True})}
        )
    assert method_of(batch.layers, config, torch.device("cpu")) is None


@pytest.mark.parametrize("name", ["form", "bytes", "interleaved", "missing"])
def test_caches_of_other_forms_are_not_readable(name: str) -> None:
    batch = Batch(Case())
    method = method_of(batch.layers, CONFIG, torch.device("cpu"))
    assert method is not None
    assert method.plain()
    layer = batch.layers[1]
    if name == "interleaved":
        layer.isa = "amx"
    else:
        cache: torch.Tensor = layer.kv_cache
        others = {"form": cache[..., :48], "bytes": cache.to(torch.uint8), "missing": torch.tensor([])}
        layer.kv_cache = others[name]
    assert not method.plain()


def test_attention_is_off_by_default_where_no_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Case())
    for asked in ("", "kernel"):
        monkeypatch.setenv("HELMSIGHT_ATTENTION", asked)
        assert method_of(batch.layers, CONFIG, torch.device("cpu")) is None
    monkeypatch.setenv("HELMSIGHT_ATTENTION", "flash")
    with pytest.raises(ValueError, match="'flash'"):
        method_of(batch.layers, CONFIG, torch.device("cpu"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return Triton's backend, whose kernels run in Triton's interpreter; vLLM loads none on a machine without a GPU."""
    triton = pytest.importorskip("triton")
    utils = importlib.import_module("vllm.triton_utils")
    monkeypatch.setattr(utils, "triton", triton)
    monkeypatch.setattr(utils, "tl", importlib.import_module("triton.language"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    backend = "vllm.v1.attention.backends.triton_attn"
    for name in [*sys.modules]:
        if name == backend or name.startswith("vllm.v1.attention.ops.triton"):
            monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(backend)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "changes", [{}, {"window": 9}, {"cap": 2.0, "sinks": True, "layout": "HND"}, {"decoded": 4, "prompts": (20, 37)}]
)
def test_sums_are_those_of_the_triton_kernel(kernels: ModuleType, changes: dict[str, Any]) -> None:
    """Keys and one-hot values are written by the code of vLLM, whose kernel sums weights by label."""
    case = Case(
        **{"backend": "TritonAttentionImpl", "prompts": (24, 9), "heads": 4, "decoded": 1, "chunk": 30, **changes}
    )
    batch = Batch(case)
    reader = reader_of(batch)
    for spans, queries, common in batch.steps():
        scratch = (common.num_actual_tokens, case.heads, 4)
        meta = TritonAttentionMetadata(
            **{name: value for name, value in vars(common).items() if name != "block_table_tensor"}, causal=True,
            seq_threshold_3D=8, num_par_softmax_segments=4, softmax_segm_output=torch.zeros(*scratch, case.width),
            softmax_segm_max=torch.zeros(scratch), softmax_segm_expsum=torch.zeros(scratch),
        )  # fmt: skip
        reader.begin(spans, SPANS)
        kept = list[torch.Tensor]()
        for number, layer in batch.layers.items():
            keys, values = list[torch.Tensor](), list[torch.Tensor]()
            for span in spans:
                part = slice(span.start, span.stop)
                keys.append(batch.keys[int(span.answer.plan.number)][number, part])
                labels = torch.from_numpy(span.answer.labels_at(span.start, span.stop))
                one_hot = torch.zeros(len(labels), case.shared, case.width)
                one_hot[labels >= 0, :, labels[labels >= 0]] = 1
                values.append(one_hot)
            query, output = queries[number], torch.zeros_like(queries[number])
            impl = object.__new__(kernels.TritonAttentionImpl)
            impl.__dict__.update(vars(layer.impl), fp8_dtype=torch.float8_e4m3fn)
            layer.kv_cache[torch.isnan(layer.kv_cache)] = 0  # the kernel multiplies what it does not see by zero
            before = layer.kv_cache.clone()
            impl.do_kv_cache_update(layer, torch.cat(keys), torch.cat(values), layer.kv_cache, meta.slot_mapping)
            assert torch.equal(before[..., : case.width], layer.kv_cache[..., : case.width])  # as `Batch` wrote them
            impl.forward(layer, query, None, None, layer.kv_cache, meta, output)
            kept.append(output.mean(1)[:, :SPANS])
            reader._read(number, number, Pass(layer.impl, layer, query, layer.kv_cache, meta))
        looked = [
            span.first + at - span.start for span in spans for begin, end in span.looked for at in range(begin, end)
        ]
        assert looked
        assert reader._sums is not None
        assert (reader._sums - torch.stack(kept)[:, looked]).abs().max() < 1e-6
        assert math.isfinite(float(reader._sums.sum()))
        reader.end()
