"""Decode steps that are captured once and run again over the same memory: the answers of those that run as they are.

There is no GPU here: what stands for a graph runs the captured call again, and writes to what it wrote to first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

import steering
from steering import Diagnose, Fault, Generate, Request, Sage, Sampling, See, Think, devices
from steering.accel import cuda_graphs
from steering.accel.cuda_graphs import DecodeGraphs
from steering.accel.tensors import Bound
from steering.decoder import kv
from steering.decoder.kv import LEAST, KVPool
from steering.interventions.published.agla import Agla
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only
from steering.interventions.published.opera import Opera
from steering.interventions.published.vista import Vista, VistaSteering
from steering.protocol.readout import REGISTRY
from steering.triton.capture import Captured
from tests.steering.conftest import LoadMLLM, MakeEngine
from tests.steering.cpu.conftest import check_alike
from tests.steering.interventions.pushes import unit_vector

FAMILIES = ("qwen2_vl", "gemma3", "internvl")


def again(run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
    """Return a capture whose memory each replay overwrites."""
    outputs = run()

    def replay() -> None:
        for kept_output, new in zip(outputs, run(), strict=True):
            kept_output.copy_(new)

    return replay, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_graphs_equal_eager_answers(
    family: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can be asked, beside each other, while rows come and go."""
    plain, ours = (make_engine(family, slots=8, max_length=512) for _ in range(2))
    mllm = ours.mllm
    graphs = DecodeGraphs(mllm, captures=lambda: again)
    ours.core.runner.passes.use(graphs)
    steer = steering.Steer(unit_vector(mllm), 0.5)
    see, think = See(alpha=0.4, shallow=1), Think(threshold=0.01)
    everything = Diagnose(frozenset(REGISTRY), causal=True)
    picture = Image.linear_gradient("L").resize((56, 56)).convert("RGB")
    words = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what"}]}]
    text = [{"role": "user", "content": "what?"}]

    def asked(tokens: int, *interventions: Any, messages: Any = words, diagnose: Diagnose | None = None) -> Request:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=2)
        return Request(messages, sampling, interventions, diagnose=diagnose)

    several = [
        asked(5, messages=text),
        asked(12, steer),
        asked(9, Sage(see, think, Generate(refresh=4)), diagnose=everything),
        asked(12, steering.Pai(amplify=0.5, first_layer=0)),
        asked(3, messages=text, diagnose=everything),
    ]
    batches = (several[:1], several, several[1:3])
    expected = [plain.generate(requests) for requests in batches]
    for requests, answers in zip(batches, expected, strict=True):
        check_alike(answers, ours.generate(requests))
    assert graphs.taken >= 20
    assert {rows for form in graphs._all_forms() for rows in form.graphs} >= {1, 2, 8}
    assert len(graphs) < graphs.taken / 2


def test_published_decoders_beside_graphs_answer_as_eagerly(make_engine: MakeEngine) -> None:
    """Graphs hold all of their decodes, beside which candidates are run eagerly."""
    plain, ours = (make_engine("qwen2_vl", slots=16, max_length=256) for _ in range(2))
    graphs = DecodeGraphs(ours.mllm, captures=lambda: again)
    ours.core.runner.passes.use(graphs)
    picture = Image.linear_gradient("L").resize((56, 56)).convert("RGB")
    words = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what"}]}]
    sampling = Sampling(max_tokens=12, ignore_eos=True, logprobs=2)
    methods = (M3id(threshold=1.0), Agla(), Only(), Vista(strength=0.3), Opera(scale=300.0, threshold=1), None)
    asked = [steering.decide(plain, Request(words, sampling, method or ())) for method in methods]
    for requests in (asked, *([request] for request in asked)):
        before = graphs.taken
        check_alike(plain.generate(requests), ours.generate(requests))
        assert graphs.taken >= before + 11


def test_what_clients_choose_drops_no_usual_graph(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_OCCASIONAL", 2)
    engine = make_engine("qwen2_vl", slots=4, max_length=256)
    graphs = DecodeGraphs(engine.mllm, captures=lambda: again)
    engine.core.runner.passes.use(graphs)
    choices = [VistaSteering(strength=0, window=window) for window in ([0], [1], [0, 1], [0, 1, 2])]
    plain = answered(engine, 6, pictures=1)
    answers = [answered(engine, 6, interventions=[choice], pictures=1) for choice in (*choices, *choices[-1:])]
    assert answers[-1] == answers[-2]
    assert [len(form.graphs) for form in graphs._occasional] == [1, 1]
    assert answered(engine, 6, pictures=1) == plain
    (usual,) = graphs._all_forms()
    assert list(usual.graphs) == [1]
    while graphs.prepare_next():
        pass
    assert (list(usual.graphs), len(graphs)) == ([1, 2, 4], 5), "more rows of usual steps alone"


def test_padding_rows_write_to_the_spare_column(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    pool = KVPool(4, 64)
    pool.allot(mllm.column())
    graphs = DecodeGraphs(mllm, captures=lambda: again)
    before = [tensor.clone() for tensor in pool.tensors]
    places = torch.tensor([3, 7, 5])
    with torch.inference_mode():
        computed = graphs.decode(Bound([]), None, torch.tensor([5, 6, 7]), places, places, 64, pool)
    assert computed is not None
    assert computed.logits is not None
    assert computed.logits.shape == (3, mllm.vocab_size)
    for after, untouched in zip(pool.tensors, before, strict=True):
        changed = (after != untouched).any(-1).any(1)  # (slots, columns)
        assert [row.nonzero()[:, 0].tolist() for row in changed] == [[3, 63], [7, 63], [5, 63], [63]]


@pytest.mark.parametrize(("needed", "read"), [(1, LEAST), (256, 256), (257, 384), (385, 512), (600, 768), (900, 1000)])
def test_the_number_of_columns_is_rounded_to_few_values(needed: int, read: int, load_mllm: LoadMLLM) -> None:
    assert DecodeGraphs(load_mllm("qwen2_vl"), captures=lambda: again).columns(needed, KVPool(1, 1000)) == read


class Counted:
    """Captures as `again` does, so many before there is no room."""

    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.made.append(0)

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
        if self.made[-1] == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.made[-1] += 1
        return again(run, device)


def answered(engine: steering.Engine, tokens: int, pictures: int = 0, **options: Any) -> tuple[int, ...]:
    """Return the tokens of an answer that reads more columns over time."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    parts = [{"type": "image", "image": Image.new("RGB", (56, 56))}] * pictures
    request = Request([{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], sampling, **options)
    return engine.generate([request])[0].choices[0].token_ids


def test_a_graph_is_captured_per_number_of_columns_with_hooks_that_change(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "LEAST", 32)
    engine = make_engine("qwen2_vl", slots=2, max_length=96)
    monkeypatch.setattr(Counted, "made", [])
    graphs = DecodeGraphs(engine.mllm, captures=Counted)
    engine.core.runner.passes.use(graphs)
    answered(engine, 60, diagnose=Diagnose())
    assert Counted.made == [4], "of 32, 48, 64 and 96 columns"
    assert len(graphs) == 4


def test_too_many_graphs_are_all_dropped_with_their_memory(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "LEAST", 32)
    plain, engine = (make_engine("qwen2_vl", slots=2, max_length=96) for _ in range(2))
    monkeypatch.setattr(Counted, "made", [])
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    graphs = DecodeGraphs(engine.mllm, captures=Counted)
    engine.core.runner.passes.use(graphs)
    assert answered(engine, 60) == answered(plain, 60)
    assert (Counted.made, len(graphs)) == ([2, 2], 2)


def test_steps_that_cannot_be_captured_yet_run_eagerly(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv, "LEAST", 32)
    plain, engine = (make_engine("qwen2_vl", slots=2, max_length=96) for _ in range(2))
    monkeypatch.setattr(Counted, "made", [])
    graphs = DecodeGraphs(engine.mllm, captures=Counted)
    engine.core.runner.passes.use(graphs)
    Counted.made[-1] = 7
    with pytest.raises(Fault, match="out of memory"):
        answered(engine, 60)  # two, and no third one before it was tried whether there are any
    graphs.tried = True
    assert answered(engine, 60) == answered(plain, 60)
    assert answered(engine, 60) == answered(plain, 60)
    assert [record.message for record in caplog.records if "captured" in record.message] == [
        "no more decode steps are captured; the rest run eagerly: CUDA out of memory."
    ]
    assert len(graphs) == 2


def test_nothing_more_is_captured_where_memory_is_short(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "LEAST", 32)
    plain, engine = (make_engine("qwen2_vl", slots=2, max_length=96) for _ in range(2))
    graphs = DecodeGraphs(engine.mllm, captures=lambda: again)
    engine.core.runner.passes.use(graphs)
    answered(engine, 3)
    graphs.tried, captured = True, len(graphs)
    free = [devices.LEAST_FREE - 1]
    monkeypatch.setattr(devices, "free_bytes", lambda device: free[0])
    assert answered(engine, 60) == answered(plain, 60)
    assert not graphs.prepare_next()
    assert len(graphs) == captured
    free[0] += 1
    assert graphs.prepare_next()
    assert len(graphs) == captured + 1
