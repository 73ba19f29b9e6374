"""A model with recurrent states answers the same alone and beside others, from its cache, in graphs and after failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import Request, RequestError, Sampling
from steering.accel.cuda_graphs import DecodeGraphs
from steering.prompt.layout import build_prompt
from steering.recurrent.states import GRAIN
from tests import families
from tests.steering.accel.recorded import Recorded
from tests.steering.parallel.asking import chat, differences, picture, requests, said, small, told

FAMILIES = ("qwen3_5", "lfm2_vl")
"""One with linear attention, one with short convolutions."""
RED, BLUE = picture(200, 30, 40), picture(20, 60, 220)
SYSTEM = {"role": "system", "content": "The star is red, the circle is green, the heart is blue. " * 3}


@pytest.fixture(scope="module", params=FAMILIES)
def mllm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> steering.MLLM:
    return steering.load(small(tmp_path_factory.mktemp("recurrent") / "model", request.param), device="cpu")


@pytest.fixture(scope="module")
def asked(mllm: steering.MLLM) -> dict[str, Request]:
    return requests(mllm)


@pytest.fixture(scope="module")
def expected(mllm: steering.MLLM, asked: dict[str, Request]) -> dict[str, Any]:
    """Return the answers of an engine that answers one request at a time, each prompt whole."""
    engine = an_engine(mllm)
    return {name: said(engine.generate([request])[0]) for name, request in asked.items() if name != "only"}


def an_engine(mllm: steering.MLLM, **options: Any) -> steering.Engine:
    settings: dict[str, Any] = {"slots": 6, "max_length": 512, "self_check": False, "prefix_cache_bytes": 0} | options
    return steering.Engine(mllm, **settings)


def plainly(mllm: steering.MLLM, messages: list[dict[str, Any]], steps: int) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens and log-probabilities (steps, vocabulary) of transformers' own `generate`."""
    inputs = build_prompt(mllm, messages).inputs
    with torch.inference_mode():
        out = mllm.model.generate(
            **inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return out.sequences[0, -steps:].tolist(), torch.cat(out.logits).log_softmax(-1)


def test_a_readout_by_layer_is_of_the_layers_that_attend(mllm: steering.MLLM) -> None:
    assert (mllm.attention_layers, mllm.recurrent_layers) == ((1, 3), (0, 2, 4))
    engine = an_engine(mllm)
    asked = {"include": {"patches", "focus"}, "layers": [3]}
    result = engine.generate([Request(chat(RED), Sampling(max_tokens=2), diagnose=steering.Diagnose(**asked))])[0]
    report = result.choices[0].diagnostics
    assert [entry["layers"] for entry in report["patches"]] == [[3]]
    assert len(report["focus"]["sigma"]) == 2
    with pytest.raises(RequestError, match=r"those with softmax attention, \[1, 3\]; got \[2\]"):
        engine.generate([Request(chat(RED), diagnose=steering.Diagnose(include={"patches"}, layers=[2]))])
    with pytest.raises(RequestError, match="'only' needs layers built like Llama's"):
        engine.generate([requests(mllm)["only"]])


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_budget": 48}, {"slots": 4, "prefix_cache_bytes": 2**26}],
    ids=["together", "in chunks", "in few slots, cached"],
)
def test_all_kinds_of_answers_are_the_same(
    mllm: steering.MLLM, asked: dict[str, Request], expected: dict[str, Any], options: dict[str, Any]
) -> None:
    engine = an_engine(mllm, **options)
    some = {name: request for name, request in asked.items() if name in expected}
    for _ in range(2):  # of the cached ones, the second time
        assert differences(told(engine, some), expected, tolerance=2e-4) == []


@pytest.mark.slow
def test_graphs_and_overlap_answer_the_same(
    mllm: steering.MLLM, asked: dict[str, Request], expected: dict[str, Any]
) -> None:
    engine, graphs = an_engine(mllm), DecodeGraphs(mllm, captures=Recorded)
    engine.core.runner.passes.use(graphs)
    engine.core.steps.overlap = True
    some = {name: request for name, request in asked.items() if name in expected}
    for _ in range(2):
        assert differences(told(engine, some), expected, tolerance=2e-4) == []
    assert graphs.taken > 2 * len(graphs) > 20
    assert graphs.prompts.taken == 0


def test_a_prompt_goes_on_behind_the_states_of_an_earlier_one(mllm: steering.MLLM) -> None:
    cold, warm = an_engine(mllm), an_engine(mllm, prefix_cache_bytes=2**26)

    def cached(question: str, image: Any = RED) -> int:
        messages = [SYSTEM, *chat(image, text=question)]
        request = Request(messages, Sampling(max_tokens=3, logprobs=3, ignore_eos=True))
        expected, result = (engine.generate([request])[0] for engine in (cold, warm))
        assert differences(said(result), said(expected)) == []
        tokens, logprobs = plainly(mllm, messages, 3)
        assert list(result.choices[0].token_ids) == tokens
        reported = [token.logprob for token in result.choices[0].logprobs or ()]
        assert reported == pytest.approx(
            [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)], abs=2e-4
        )
        return result.cached_tokens

    first = cached("What colour is the star? " * 5)
    again = cached("What colour is the star? " * 5)
    assert (first, again % GRAIN) == (0, 0)
    assert again > 2 * GRAIN
    departs = cached("Is the circle red, or is it blue? " * 5)
    assert departs < again, "no states were kept where the second question departs"
    third = cached("Where is the heart? " * 5)
    assert departs < third <= again
    assert third % GRAIN == 0
    assert cached("Where is the heart? " * 5, BLUE) < third
    assert warm.stats()["prefix_cache_bytes"] <= 2**26


def test_prompts_that_arrive_together_share_their_beginning(mllm: steering.MLLM) -> None:
    cold, warm = an_engine(mllm), an_engine(mllm, prefix_cache_bytes=2**26)
    questions = "What colour is the star? " * 4, "Is the circle red? " * 5, "Where is the heart, and where the circle?"
    asked = [
        Request([SYSTEM, *chat(RED, text=text)], Sampling(max_tokens=3, logprobs=3, ignore_eos=True))
        for text in questions
    ]
    expected, results = cold.generate(asked), warm.generate(asked)
    assert differences([said(one) for one in results], [said(one) for one in expected]) == []
    first, *others = [result.cached_tokens for result in results]
    assert first == 0
    assert min(others) >= GRAIN
    assert all(cached % GRAIN == 0 for cached in others)


def test_a_step_that_fails_is_run_again_on_the_same_states(
    mllm: steering.MLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(mllm)
    messages = chat(RED, text="Which picture is red? " * 5)
    tokens, _ = plainly(mllm, messages, 6)
    last, calls = mllm.layers[-1], 0
    forward = last.forward

    def fails_at_times(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 5):
            raise RuntimeError("for once")
        return forward(*args, **kwargs)

    monkeypatch.setattr(last, "forward", fails_at_times)
    request = Request(messages, Sampling(max_tokens=6, ignore_eos=True))
    assert list(engine.generate([request])[0].choices[0].token_ids) == tokens
    assert calls > 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_self_check(root: Path, dtype: str, family: str) -> None:
    half = steering.load(families.checkpoint(family, root), device="cpu", dtype=dtype)
    engine = steering.Engine(half, slots=2, max_length=512)
    inputs, *others = engine.core.runner.pool.states.tensors
    assert inputs.dtype == half.dtype
    assert family == "lfm2_vl" or others[0].dtype == torch.float32
