"""With overlap, the host reads the tokens of a pass behind the launch of the next one, and answers stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import steering
from steering import Diagnose, Engine, Grammar, Request, Sampling, Steer, Think
from steering.front import engine as front
from steering.runner.passes import Passes
from steering.runner.sampler import HostCopy
from tests.steering.conftest import MakeEngine
from tests.steering.parallel import asking
from tests.steering.parallel.asking import chat, differences, requests, said, told


@pytest.fixture(scope="module")
def mllm(tmp_path_factory: pytest.TempPathFactory) -> steering.MLLM:
    return steering.load(asking.small(tmp_path_factory.mktemp("model")), device="cpu")


def engine(mllm: steering.MLLM, *, overlap: bool, **options: Any) -> Engine:
    settings: dict[str, Any] = {"slots": 6, "max_length": 512, "self_check": False, "prefill_budget": 80} | options
    return Engine(mllm, overlap=overlap, **settings)


def test_all_kinds_of_answers_are_the_same(mllm: steering.MLLM) -> None:
    asked = requests(mllm)
    expected, found = (told(engine(mllm, overlap=overlap), asked) for overlap in (False, True))
    assert differences(expected, found) == []


def noise(seed: int) -> Image.Image:
    """Return a picture without two patches that are looked at alike, whose order would depend on rounding."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (84, 84, 3), dtype=np.uint8))


def mixed(mllm: steering.MLLM, count: int) -> Iterator[Request]:
    """Yield requests whose answers end at tokens that nobody knows beforehand, most of them measured."""
    drawn = random.Random(7)
    vector = steering.VectorStore(Path(str(mllm.path)) / "vectors").get("modality-preference")
    end = min(mllm.stop_ids)
    for number in range(count):
        ends: dict[str, Any] = drawn.choice(
            [
                {"logit_bias": {end: drawn.choice([4.0, 6.0, 8.0])}},
                {"stop": (drawn.choice(["a", "e", "th"]),)},
                {"ignore_eos": True},
                {"repetition_penalty": 1.3, "logit_bias": {end: 6.0}, "logprobs": 2},
            ]
        )
        asks: dict[str, Any] = drawn.choice(
            [
                {},
                {"diagnose": True},
                {"interventions": (Steer.to(vector, "vision"), Think(gamma=0.4)), "diagnose": Diagnose(causal=True)},
                {"interventions": steering.Generate(refresh=2)},
                {"n": 2, "diagnose": True},
                {"grammar": Grammar.regex("[a-z]{1,5}")},
            ]
        )
        if "grammar" in asks:
            ends = {}
        sampling = Sampling(max_tokens=drawn.randint(1, 12), temperature=1.0, seed=number, **ends)
        yield Request(chat(noise(number), text="Which? " * drawn.randint(1, 9)), sampling, **asks)


def test_answers_that_end_early_are_the_same_with_what_was_measured(mllm: steering.MLLM) -> None:
    asked = list(mixed(mllm, 40))
    expected, found = (engine(mllm, overlap=overlap, slots=4).generate(asked) for overlap in (False, True))
    reasons = [choice.finish_reason for result in expected for choice in result.choices]
    lengths = {len(choice.token_ids) for result in expected for choice in result.choices}
    assert {"stop", "length"} <= set(reasons)
    assert len(lengths) > 4
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert not differences(said(one), said(other), str(number), tolerance=5e-4)
        assert [choice.text for choice in one.choices] == [choice.text for choice in other.choices]
        assert [choice.finish_reason for choice in one.choices] == [choice.finish_reason for choice in other.choices]
        assert (one.prompt_tokens, one.completion_tokens) == (other.prompt_tokens, other.completion_tokens)


def test_who_leaves_or_fails_meanwhile_changes_no_other(mllm: steering.MLLM) -> None:
    asked = list(mixed(mllm, 24))
    there = engine(mllm, overlap=True, slots=4, max_waiting=64)
    running = [there.submit(request) for request in asked]
    for steps in range(400):
        if not there.core.has_work:
            break
        there.step()
        if steps % 3 == 0 and steps < 24:
            running[steps].cancel()
    assert not there.core.has_work
    expected = engine(mllm, overlap=False, slots=4).generate(asked)
    compared = 0
    for number, completion in enumerate(running):
        if number % 3 or number >= 24:
            found = completion.result()
            assert not differences(said(expected[number]), said(found), str(number), tolerance=5e-4)
            compared += 1
    assert compared == 16
    assert there.stats()["kv_tokens"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_order_of_launches_and_reads(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    order: list[str] = []
    decode, read = Passes.decode, HostCopy.read
    monkeypatch.setattr(Passes, "decode", lambda *args: order.append("launch") or decode(*args))
    monkeypatch.setattr(HostCopy, "read", lambda copy: order.append("read") or read(copy))
    there = make_engine("qwen2_vl", overlap=overlap)
    (result,) = there.generate([Request(chat(), Sampling(max_tokens=4, ignore_eos=True))])
    assert len(result.choices[0].token_ids) == 4
    assert there.core.steps.overlap is overlap
    # The first token comes of the prefill; behind the last one nothing is launched.
    expected = ["launch", "read"] * 3 + ["read"] if overlap else ["read", "launch"] * 3 + ["read"]
    assert order == expected


def test_an_engine_that_answers_otherwise_does_without(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    there = make_engine("qwen2_vl")
    assert front._overlap_is_exact(there)
    generate = there.generate
    different = iter(["?", "Another question"])

    def other(asked: list[Request]) -> Any:
        return generate([Request([{"role": "user", "content": next(different)}], asked[0].sampling)])

    there.generate = other  # type: ignore[method-assign, assignment]
    assert not front._overlap_is_exact(there)
    assert "reads the tokens of each step before the next one" in caplog.text
