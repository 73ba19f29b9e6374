"""Pictures whose sizes recur are encoded in graphs, by recordings that stand for CUDA's, as they are eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

import steering
from steering import MLLM, Request, Sampling, devices
from steering.accel import picture_graphs
from steering.accel.cuda_graphs import DecodeGraphs
from steering.accel.picture_graphs import PATIENCE, PictureGraphs
from steering.model.images import joined
from steering.prompt.layout import build_prompt
from steering.vision import attention
from tests.steering.accel.recorded import Recorded
from tests.steering.conftest import LoadMLLM

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava")


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def tensors(mllm: MLLM, seed: int, *sizes: tuple[int, int]) -> Mapping[str, torch.Tensor]:
    parts = [{"type": "image", "image": noise(seed + number, size)} for number, size in enumerate(sizes)]
    return joined(build_prompt(mllm, [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]).pictures)


def graphs_of(mllm: MLLM) -> PictureGraphs:
    return PictureGraphs(mllm, Recorded())


def leaves(features: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in tree_leaves((features.pooler_output, features.get("deepstack_features"))) if leaf is not None
    ]


@torch.inference_mode()
def encoded(graphs: PictureGraphs, mllm: MLLM, seeds: range, *sizes: tuple[int, int]) -> list[bool]:
    """Encode new pictures of these sizes for each seed; return whether each was in a graph, after comparing its features."""
    in_graphs = []
    for seed in seeds:
        pictures = tensors(mllm, seed, *sizes)
        features, expected = graphs.features(pictures), mllm.image_features(pictures)
        in_graphs.append(features is not None)
        if features is not None:
            for ours, eager in zip(leaves(features), leaves(expected), strict=True):
                torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    return in_graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_recurring_pictures_have_their_own_features(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    graphs = graphs_of(mllm)
    assert encoded(graphs, mllm, range(PATIENCE + 3), (56, 42)) == [False] * PATIENCE + [True] * 3
    assert graphs.taken == 3
    if family != "llava":
        assert encoded(graphs, mllm, range(PATIENCE + 2), (56, 42), (28, 70)) == [False] * PATIENCE + [True] * 2
        assert encoded(graphs, mllm, range(2), (56, 42)) == [True] * 2, "after the memory of both was used"
        assert len(graphs) == 2


def test_what_caches_drop_stays_with_a_graph(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = load_mllm("qwen2_5_vl")
    graphs, used = graphs_of(mllm), list[torch.Tensor]()
    packed_runs = attention.packed_runs

    def noted(*packing: Any) -> attention.PackedRuns:
        runs = packed_runs(*packing)
        used.extend(tensor for tensor in runs[1:] if tensor is not None)
        return runs

    monkeypatch.setattr(attention, "packed_runs", noted)
    encoded(graphs, mllm, range(PATIENCE + 1), (98, 70))
    grid = tuple(tensors(mllm, 0, (98, 70))["image_grid_thw"][0].tolist())
    used += [part for part in mllm._geometry._arguments_of((grid,), mllm.device)[0].values() if torch.is_tensor(part)]
    (graph,) = graphs._graphs.values()
    kept = {tensor.untyped_storage().data_ptr() for tensor in graph.kept}
    assert len({tensor.data_ptr() for tensor in used}) > 3
    read = [tensor.untyped_storage().data_ptr() in kept for tensor in used]
    assert sum(read) > len(read) / 2  # ends of sequences are read on the host


def test_features_stay_what_they_were(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen3_vl")
    graphs = graphs_of(mllm)
    encoded(graphs, mllm, range(PATIENCE + 1), (56, 42))
    with torch.inference_mode():
        first = graphs.features(tensors(mllm, 50, (56, 42)))
        before = [leaf.clone() for leaf in leaves(first)]
        graphs.features(tensors(mllm, 51, (56, 42)))
    assert all(map(torch.equal, leaves(first), before))


def test_a_graph_gives_way_only_if_it_was_not_used_for_long(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_graphs, "MOST", 1)
    monkeypatch.setattr(picture_graphs, "STALE", 24)
    mllm = load_mllm("qwen2_vl")
    graphs = graphs_of(mllm)
    assert any(encoded(graphs, mllm, range(PATIENCE + 1), (28, 28)))
    assert not any(encoded(graphs, mllm, range(PATIENCE + 3), (56, 28)))
    assert all(encoded(graphs, mllm, range(2), (28, 28)))
    assert encoded(graphs, mllm, range(24), (56, 28))[-1]
    assert [*graphs._graphs] == [((1, 4, 8),)]
    assert not any(encoded(graphs, mllm, range(3), (28, 28)))


def test_sizes_that_do_not_recur_soon_are_forgotten(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_graphs, "STALE", 10)
    mllm = load_mllm("qwen2_vl")
    graphs = graphs_of(mllm)
    for _ in range(PATIENCE + 1):
        encoded(graphs, mllm, range(1), (28, 28))
        for side in range(2, 11):
            encoded(graphs, mllm, range(1), (28, 14 * side))
    assert len(graphs) == 0


def test_other_tensors_than_pixels_and_grids_have_no_graph(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    graphs = graphs_of(mllm)
    pictures = {**tensors(mllm, 0, (28, 28)), "image_sizes": torch.tensor([[28, 28]])}
    assert [graphs.features(pictures) for _ in range(PATIENCE + 2)] == [None] * (PATIENCE + 2)


def test_an_encoder_that_reads_grids_on_the_device_has_no_graph(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the device within a capture."""
    mllm = load_mllm("glm4v")
    monkeypatch.setattr(mllm.encoder, "splits_on_the_host", False)
    assert not any(encoded(graphs_of(mllm), mllm, range(PATIENCE + 2), (56, 42)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("too large", None),
        ("no memory", None),
        ("an error", "no more pictures are captured"),
        ("out of memory", "are encoded eagerly: it ended"),
        ("other features", "has other features"),
    ],
)
def test_other_pictures_are_encoded_eagerly(
    kind: str, words: str | None, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mllm = load_mllm("qwen2_vl")
    recorded, calls = Recorded(), list[int]()

    def capture(run: Any, device: torch.device) -> Any:
        calls.append(len(calls))
        if kind == "an error":
            raise RuntimeError(kind)
        if kind == "out of memory":
            raise torch.OutOfMemoryError("it ended")
        outputs = [output.clone() for output in run()]
        return lambda: outputs[0].mul_(1.5), outputs

    graphs = PictureGraphs(mllm, recorded)
    encoded(graphs, mllm, range(PATIENCE + 1), (28, 28))
    graphs._capture = capture
    if kind == "too large":
        monkeypatch.setattr(picture_graphs, "MOST_PATCHES", 40)
    if kind == "no memory":
        monkeypatch.setattr(devices, "free_bytes", lambda device: 2**20)
    assert not any(encoded(graphs, mllm, range(PATIENCE + 3), (56, 42)))
    assert caplog.text.count(words or "\0") == len(calls) == (words is not None)
    assert all(encoded(graphs, mllm, range(2), (28, 28))), "graphs that are right stay in use"
    graphs._capture = recorded
    others = any(encoded(graphs, mllm, range(PATIENCE + 3), (28, 56)))
    assert others == (kind in ("too large", "out of memory", "other features"))
    if kind == "no memory":
        monkeypatch.setattr(devices, "free_bytes", lambda device: 2**40)
    assert any(encoded(graphs, mllm, range(PATIENCE + 3), (56, 42))) == (kind == "no memory"), "memory may come back"


def test_answers_about_pictures_in_graphs_are_the_same(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_5_vl")
    plain, ours = (
        steering.Engine(mllm, slots=4, max_length=512, self_check=False, image_cache_bytes=0) for _ in range(2)
    )
    graphs = DecodeGraphs(mllm, captures=Recorded)
    ours.core.runner.passes.use(graphs)
    sampling = Sampling(max_tokens=5, ignore_eos=True, logprobs=2)
    for seed in range(PATIENCE + 3):
        parts = [{"type": "image", "image": noise(seed, (98, 70))}, {"type": "text", "text": "What is it?"}]
        request = Request([{"role": "user", "content": parts}], sampling)
        first, second = (engine.generate([request])[0].choices[0] for engine in (plain, ours))
        assert first.token_ids == second.token_ids
        for one, other in zip(first.logprobs or (), second.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert graphs.pictures.taken == 3
