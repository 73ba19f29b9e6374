"""Prompts as recorded operations, which stand for CUDA graphs, answer as eager ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Request, Sampling, See, devices
from steering.accel import prompt_graphs, prompt_step
from steering.accel.cuda_graphs import DecodeGraphs
from steering.accel.prompt_graphs import PromptGraphs
from steering.accel.prompt_step import PackedPrompts, Unsupported, places_of
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.interventions.look_at import LookAt
from tests.steering.accel.recorded import Recorded
from tests.steering.accel.test_picture_graphs import noise
from tests.steering.conftest import MakeEngine
from tests.steering.cpu.conftest import check_alike
from tests.steering.interventions.pushes import unit_vector
from tests.steering.triton.reference import pooled

FAMILIES = ("qwen2_vl", "qwen3_vl", "llava", "aya_vision", "qwen3_vl_moe", "qwen3_5", "gpt_oss")
FOCUS = Diagnose(frozenset({"focus", "modality"}))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_step, "pooled", pooled)
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 0)


def asked(text: str, *interventions: Any, seed: int | None = None, diagnose: Diagnose | None = None) -> Request:
    picture = [] if seed is None else [{"type": "image", "image": noise(seed, (56, 42))}]
    messages = [{"role": "user", "content": [*picture, {"type": "text", "text": text}]}]
    return Request(messages, Sampling(max_tokens=2, ignore_eos=True, logprobs=2), interventions, diagnose=diagnose)


def beside_each_other(make_engine: MakeEngine, family: str, **options: Any) -> tuple[Any, Any, PromptGraphs]:
    """Return an eager engine, one with graphs, and these."""
    plain, ours = (make_engine(family, slots=6, **{"max_length": 256} | options) for _ in range(2))
    graphs = DecodeGraphs(ours.mllm, captures=Recorded)
    ours.core.runner.passes.use(graphs)
    return plain, ours, graphs.prompts


def compare(plain: Any, ours: Any, *batches: list[Request]) -> None:
    for requests in batches:
        check_alike(plain.generate(requests), ours.generate(requests))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_graphs_are_answered_as_eager_ones(family: str, make_engine: MakeEngine) -> None:
    """Alone and packed, in chunks and behind cached prefixes, with pictures and without."""
    plain, ours, graphs = beside_each_other(make_engine, family, prefill_budget=100, prefix_cache_bytes=2**24)
    several = [
        asked("what?"),
        asked("Which of them is red? " * 3),
        asked("where?", seed=1),
        asked("And this one?", seed=2),
    ]
    long = [asked("Say what is in the picture, and where it is. " * 8, seed=3)]
    compare(plain, ours, several, long, several[1:3], long, several, several)
    assert graphs.taken > 2 * len(graphs)
    assert all(form.graph and form.agreed for form in graphs._forms)
    overlays = {bool(form.inputs.overlay) for form in graphs._forms}
    assert overlays == ({True, False} if family.startswith("qwen3_vl") else {False})


def test_prompts_under_hooks_are_answered_as_eager_ones(make_engine: MakeEngine) -> None:
    plain, ours, graphs = beside_each_other(make_engine, "qwen2_5_vl", prefill_budget=60, prefix_cache_bytes=2**24)
    steer = steering.Steer(unit_vector(ours.mllm), 0.5)
    words = "Where is the star, and which colour has it? " * 4
    kinds = [
        asked(words, steer, seed=1),
        asked("what?", steer, seed=2, diagnose=FOCUS),
        asked("what is it?", See(alpha=0.4, shallow=1), seed=3),
        asked(words, seed=4, diagnose=FOCUS),
    ]
    compare(plain, ours, *[[kind] for kind in kinds], kinds, *[[kind] for kind in kinds])
    assert graphs.taken > 14
    assert sum(form.columns > 0 and bool(form.agreed) for form in graphs._forms) >= 4
    assert not any(form.refused for form in graphs._forms)


def test_a_few_prompts_under_hooks_run_one_after_the_other(make_engine: MakeEngine) -> None:
    """Once there are graphs of their lengths."""
    plain, ours, graphs = beside_each_other(make_engine, "qwen2_vl", prefill_budget=512)
    several = [asked(f"what is {number}?", seed=number, diagnose=FOCUS) for number in range(3)]
    steered = asked("what is it?", steering.Steer(unit_vector(ours.mllm), 0.5), seed=3)
    compare(plain, ours, several)
    assert graphs.taken == 0
    compare(plain, ours, several[:1], [steered])
    assert graphs.taken == 2
    compare(plain, ours, [*several, steered])
    assert graphs.taken == 6
    compare(plain, ours, [*several, steered, asked("what?", seed=5)])
    assert graphs.taken == 6, "too many"


@pytest.mark.parametrize("interventions", [(), (LookAt(bias=4.0, image=1, layers=[0, 1]),)])
def test_padding_under_hooks_sees_a_column_in_a_window(interventions: tuple[Any, ...], make_engine: MakeEngine) -> None:
    """Otherwise its weights were not finite, and measurements are sums over all queries."""
    plain, ours, graphs = beside_each_other(make_engine, "aya_vision")
    compare(plain, ours, [asked("what?", *interventions, seed=1, diagnose=FOCUS)])
    assert (graphs.taken, [form.refused for form in graphs._forms]) == (1, [False])


def test_padding_is_not_what_an_earlier_prompt_left(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, graphs = beside_each_other(make_engine, "llava", max_length=128)
    long, short = asked("Which of them is red? " * 2, seed=1), asked("what?", seed=1)
    (answer,) = plain.generate([long])
    # The padding of its last token is the last to write.
    monkeypatch.setattr(prompt_graphs, "SIZES", (answer.prompt_tokens,))
    compare(plain, ours, [short], [long])
    embed = ours.mllm.embed

    def faulty(*args: Any, **more: Any) -> Any:
        embedded = embed(*args, **more)
        embedded.embeds[:, -12:] = torch.nan
        return embedded

    with monkeypatch.context() as patch:
        patch.setattr(ours.mllm, "embed", faulty)
        with pytest.raises(steering.errors.Fault):
            ours.generate([long])
    assert graphs.taken == 3
    compare(plain, ours, [short])


def test_a_prompt_that_is_not_finite_says_nothing_about_a_graph(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours, graphs = beside_each_other(make_engine, "llava")
    embed = ours.mllm.embed

    def faulty(*args: Any, **more: Any) -> Any:
        return replace(embedded := embed(*args, **more), embeds=embedded.embeds * torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(ours.mllm, "embed", faulty)
        with pytest.raises(steering.errors.Fault):
            ours.generate([asked("what?")])
    compare(plain, ours, [asked("what?")])
    assert [(form.refused, form.agreed) for form in graphs._forms] == [(False, {(False, False, False)})]


def test_more_prompts_than_a_graph_has_rows_run_eagerly(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And padding to the longest prompt may reach beyond the graph's tokens."""
    monkeypatch.setattr(prompt_graphs, "ROWS", 3)
    plain, ours, graphs = beside_each_other(make_engine, "qwen2_vl", prefill_budget=512)
    several = [asked("what?"), asked("Which of them is red? " * 2), asked("where?"), asked("what?" * 2)]
    compare(plain, ours, several)
    assert graphs.taken == 0
    compare(plain, ours, several[:3], [several[1], several[0]])
    assert graphs.taken == 2


@pytest.mark.parametrize("family", ["gemma3", "paligemma2"])
def test_prompts_that_are_not_causal_run_eagerly(family: str, make_engine: MakeEngine) -> None:
    plain, ours, graphs = beside_each_other(make_engine, family)
    compare(plain, ours, [asked("what?", seed=1)])
    assert (graphs.taken, graphs._forms) == (0, [])


def test_capped_scores_have_no_kernel() -> None:
    pool, places = KVPool(1, 4), places_of(2, [0], [0], [2], rows=1, spare=3)
    query = torch.zeros(1, 2, 2, 8)
    with pytest.raises(Unsupported):
        PackedPrompts(pool, places, 2, 0).attend(Heads(0, 1.0, None, 30.0), query, query, query, None)


def test_hooks_that_would_read_too_much_run_eagerly(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, graphs = beside_each_other(make_engine, "llava")
    request = [asked("what?", seed=1, diagnose=FOCUS)]
    with monkeypatch.context() as patch:
        patch.setattr(prompt_graphs, "MOST_SCORES", 32 * 256 - 1)
        compare(plain, ours, request)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_graphs, "MOST_TOKENS", 16)
        compare(plain, ours, request)
    with monkeypatch.context() as patch:
        patch.setattr(devices, "free_bytes", lambda device: devices.LEAST_FREE + 1000)
        compare(plain, ours, request, [asked("what?", seed=1)])
    assert graphs.taken == 1, "that without hooks"
    compare(plain, ours, request)
    assert graphs.taken == 2


def test_padding_writes_to_the_spare_column(make_engine: MakeEngine) -> None:
    plain, ours, graphs = beside_each_other(make_engine, "qwen2_vl", max_length=128)
    requests = [asked("what?"), asked("where is it?")]
    ours.generate(requests)
    pools = [engine.core.runner.pool for engine in (plain, ours)]
    with torch.inference_mode():
        for tensor in (*pools[0].tensors, *pools[1].tensors):
            tensor.fill_(3.0)
    taken = graphs.taken
    compare(plain, ours, requests)
    assert graphs.taken == taken + 1
    for expected, tensor in zip(*(pool.tensors for pool in pools), strict=True):
        changed = ~torch.isclose(expected[..., : tensor.shape[2], :], tensor, rtol=1e-4, atol=1e-5).all(-1).all(1)
        assert {tuple(place) for place in changed.nonzero().tolist()} <= {(slot, 127) for slot in range(6)}


def test_places_of_packed_prompts() -> None:
    numbers = places_of(8, [4, 5], [3, 0], [2, 3], rows=3, spare=99).tolist()
    slots, columns, bounds, of_rows, lengths = (
        numbers[begin:end] for begin, end in ((0, 8), (8, 16), (16, 21), (21, 25), (25, 29))
    )
    assert slots == [4, 4, 5, 5, 5, 4, 4, 4]
    assert columns == [3, 4, 0, 1, 2, 99, 99, 99]
    assert bounds == [0, 2, 5, 5, 8]
    assert of_rows == [4, 5, 4, 4]
    assert lengths == [5, 3, 1, 1]


def test_graphs_are_captured_with_patience_and_while_nothing_runs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 2)
    monkeypatch.setattr(prompt_graphs, "SIZES", (32, 64, 96, 128, 160, 192))  # a recording keeps all that it computes
    monkeypatch.setattr(prompt_graphs, "FIRST", (64, 128))
    plain, ours, graphs = beside_each_other(make_engine, "llava")
    request = [asked("what?", seed=1)]
    for number in range(4):
        compare(plain, ours, request)
        assert (len(graphs), graphs.taken) == ((0, 0) if number < 2 else (1, number - 1))
    tokens = graphs._forms[0].tokens
    graphs.prepare()
    assert {form.tokens for form in graphs._forms if form.graph} == {tokens, *prompt_graphs.FIRST}
    while graphs.prepare_next():
        pass
    assert sorted(form.tokens for form in graphs._forms if form.graph) == [*prompt_graphs.SIZES]
    steered = [asked("what?", See(alpha=0.4), seed=1)]
    compare(plain, ours, steered)
    assert not graphs.prepare_next(), "it may never come back"
    compare(plain, ours, steered)
    assert graphs.prepare_next()
    taken = graphs.taken
    compare(plain, ours, steered)
    assert graphs.taken == taken + 1


def test_a_graph_that_finds_no_memory_does_not_hold_up_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 8)
    monkeypatch.setattr(devices, "free_bytes", lambda device: devices.LEAST_FREE + 1000)
    _, ours, graphs = beside_each_other(make_engine, "llava")
    for request in (asked("what?", See(alpha=0.4), seed=1), asked("what?", See(alpha=0.4), seed=1), asked("what?")):
        ours.generate([request])
    assert graphs.prepare_next()


def test_first_graphs_are_captured_although_a_pass_wanted_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 8)
    _, ours, graphs = beside_each_other(make_engine, "llava")
    ours.generate([asked("what?")])
    monkeypatch.setattr(prompt_graphs, "FIRST", (graphs._forms[0].tokens, 256))
    graphs.prepare()
    assert [form.tokens for form in graphs._forms if form.graph] == [*prompt_graphs.FIRST]


@pytest.mark.parametrize(("tokens", "captured", "size"), [(20, [96], 96), (150, [320], 160), (150, [192, 320], 192)])
def test_a_larger_graph_serves_where_padding_costs_little(
    tokens: int, captured: list[int], size: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "FIRST", captured)
    _, ours, graphs = beside_each_other(make_engine, "llava")
    ours.generate([asked("what?")])
    graphs.prepare()
    exact = next(size for size in prompt_graphs.SIZES if size >= tokens)
    graphs._forms = [form for form in graphs._forms if form.tokens in captured]
    assert graphs._captured_size(exact, graphs._forms[0].inputs, ()) == size


def test_choices_of_clients_drop_no_graph_that_is_in_use(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "MOST_HOOKED", 2)
    monkeypatch.setattr(prompt_graphs, "MOST_WANTED", 2)
    monkeypatch.setattr(prompt_graphs, "STALE", 6)
    plain, ours, graphs = beside_each_other(make_engine, "llava")
    vector = unit_vector(ours.mllm)
    usual, *others = (
        [asked("what?", steering.Steer(vector, 0.5, layers=layers))] for layers in ([0], [1], [0, 1], [2], [0, 2])
    )
    compare(plain, ours, [asked("what?")], usual, others[0], *others[1:], usual)
    assert graphs.taken == 4
    assert [(form.columns > 0, form.graph is not None) for form in graphs._forms] == [
        (False, True),
        (True, True),
        (True, True),
        (True, False),
        (True, False),
    ]
    assert [form.used for form in graphs._forms[3:]] == [5, 6], "the latest"
    for _ in range(6):
        compare(plain, ours, usual)
    compare(plain, ours, others[3])
    assert [form.graph is not None for form in graphs._forms] == [True, True, False, True], "the other one was stale"


@pytest.mark.parametrize(
    ("kind", "words", "ends"),
    [
        ("no kernel", "prompts run eagerly: no kernel attends", True),
        ("an error", "no more prompts are captured", True),
        ("out of memory", "tokens run eagerly: it ended", False),
        ("other states", "has other results than the eager pass", False),
        ("no memory", None, False),
        ("too long", None, False),
    ],
)
def test_other_prompts_run_eagerly(
    kind: str,
    words: str | None,
    ends: bool,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    plain, ours, graphs = beside_each_other(make_engine, "llava")
    recorded = graphs._capture

    def capture(run: Callable[[], list[torch.Tensor]], device: torch.device) -> Any:
        if kind == "an error":
            raise RuntimeError(kind)
        if kind == "out of memory":
            raise torch.OutOfMemoryError("it ended")
        replay, outputs = recorded(run, device)

        def wrong() -> None:
            replay()
            outputs[0].mul_(1.2)

        return wrong if kind == "other states" else replay, outputs

    graphs._capture = capture
    if kind == "no kernel":
        monkeypatch.setattr(prompt_step, "pooled", lambda *args: None)
    if kind == "no memory":
        monkeypatch.setattr(devices, "free_bytes", lambda device: 2**20)
    if kind == "too long":
        monkeypatch.setattr(prompt_graphs, "SIZES", (8, 16))
    request = [asked("what?", seed=1)]
    compare(plain, ours, request, request)
    if ends:
        graphs.prepare()
    assert caplog.text.count(words or "\0") == (words is not None)
    assert len(graphs) == 0
    monkeypatch.undo()
    monkeypatch.setattr(prompt_step, "pooled", pooled)
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 0)
    graphs._capture = recorded
    compare(plain, ours, [asked("what is it? " * 8, seed=1)])
    assert len(graphs) == (not ends)
