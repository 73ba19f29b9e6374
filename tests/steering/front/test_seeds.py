"""Several answers to one prompt are independent; a seed fixes an answer, and its stream adds up to it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import steering
from steering import Request, Sampling
from steering.protocol.sequence import Sequence
from steering.runner.sampler import uniform
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import conversations, sigma
from tests.steering.inside import sequences

SAMPLED = Sampling(max_tokens=8, temperature=1.5, seed=11, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3"])
def test_each_of_n_answers_equals_its_own_prefill(
    family: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(conversations(family)[1], SAMPLED, n=4, diagnose=steering.Diagnose(), states=True)
    forked = make_engine(family).generate([request])[0]
    monkeypatch.setattr(Sequence, "can_fork", False)
    prefilled = make_engine(family).generate([request])[0]
    assert len({choice.token_ids for choice in forked.choices}) == 4
    for one, other in zip(forked.choices, prefilled.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        torch.testing.assert_close(sigma(one), sigma(other), rtol=0, atol=1e-6)
        assert one.states is not None
        assert other.states is not None
        torch.testing.assert_close(one.states, other.states, rtol=0, atol=1e-4)
    assert forked.completion_tokens == 4 * 8


def test_the_first_of_n_answers_is_the_only_one_of_the_same_seed(make_engine: MakeEngine) -> None:
    chat = families.example_messages("llava", 1)
    one = make_engine("llava").generate([Request(chat, SAMPLED)])[0].choices[0]
    first = make_engine("llava").generate([Request(chat, SAMPLED, n=3)])[0].choices[0]
    assert first.token_ids == one.token_ids


def test_a_seed_fixes_the_answer_whatever_else_runs(make_engine: MakeEngine) -> None:
    chats = conversations("qwen2_vl")
    alone = make_engine("qwen2_vl", slots=1).generate([Request(chats[0], SAMPLED)])[0].choices[0]
    others = [
        Sampling(max_tokens=3, temperature=2.0, top_p=0.7),
        Sampling(max_tokens=9, frequency_penalty=1.0, logit_bias={5: -100.0}),
        Sampling(max_tokens=5, temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.3),
    ]
    requests = [Request(chat, sampling) for chat, sampling in zip(chats[1:4], others, strict=True)]
    engine = make_engine("qwen2_vl", slots=3, prefill_budget=30)
    result = engine.generate([*requests[:2], Request(chats[0], SAMPLED), requests[2]])[2]
    assert result.choices[0].token_ids == alone.token_ids
    assert result.choices[0].text == alone.text


def test_other_seeds_and_no_seed_give_other_answers(make_engine: MakeEngine) -> None:
    chat = families.example_messages("qwen2_vl", 1)
    seeds = [0, 1, 2, -1, 2**63 - 1, None, None]
    requests = [Request(chat, dataclasses.replace(SAMPLED, seed=seed)) for seed in seeds]
    answers = [result.choices[0].token_ids for result in make_engine("qwen2_vl").generate(requests)]
    assert len(set(answers)) == len(seeds)


def test_the_n_answers_draw_unrelated_numbers(make_engine: MakeEngine) -> None:
    """No answer repeats another one's random numbers, not even a few tokens later."""
    request = Request(families.example_messages("qwen2_vl", 1), SAMPLED, n=4)
    seeds = [sequence.spec.seed for sequence in sequences(make_engine("qwen2_vl").submit(request))]
    positions = torch.arange(2000)
    numbers = torch.cat([uniform(torch.tensor(seed), positions) for seed in seeds])
    assert len(numbers.unique()) == len(numbers)


def test_chunks_of_a_stream_add_up_to_the_result(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    request = Request(conversations("qwen2_vl")[0], dataclasses.replace(SAMPLED, max_tokens=30), n=2)
    expected = engine.generate([request])[0]
    completion = engine.submit(request)
    while not completion.done:
        engine.step()
    chunks = list(completion)
    for choice in expected.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(token for chunk in own for token in chunk.logprobs) == choice.logprobs
        assert [chunk.choice is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].choice == choice
    assert completion.result().choices == expected.choices
