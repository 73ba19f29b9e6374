"""Log-probabilities of a prompt's own tokens, against plain transformers, however the prompt is read."""

from __future__ import annotations

import pytest
import torch

import steering
from steering import Request, Sampling
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine

NEAR = 2e-4
"""Nats."""
LONG = "Which colour is the star on the left, and which one is on the right? " * 4


@pytest.mark.parametrize("family", OF_EACH_KIND)
@pytest.mark.parametrize("budget", [1024, 24])
def test_they_are_those_of_plain_transformers(
    make_engine: MakeEngine, load_plain: LoadPlain, family: str, budget: int
) -> None:
    chat = families.example_messages(family, 1, text=LONG)
    engine = make_engine(family, prefill_budget=budget)
    asked = Request(chat, Sampling(max_tokens=2, prompt_logprobs=3))
    other = Request(families.example_messages(family, 1), Sampling(max_tokens=3))
    found, _ = engine.generate([asked, other])
    tokens = found.choices[0].prompt_logprobs
    assert tokens is not None
    plain = load_plain(family)
    inputs = plain.inputs(chat)
    with torch.inference_mode():
        expected = plain.model(**inputs).logits[0].float().log_softmax(-1)
    ids = inputs["input_ids"][0]
    assert [token.scored.token_id for token in tokens] == ids[1:].tolist()
    assert len(tokens) == found.prompt_tokens - 1
    for logprobs, token in zip(expected, tokens, strict=False):
        own = float(logprobs[token.scored.token_id])
        assert token.scored.logprob == pytest.approx(own, abs=NEAR)
        likeliest = logprobs.topk(3).values
        assert [top.logprob for top in token.scored.top] == pytest.approx(likeliest.tolist(), abs=NEAR)
        assert int((logprobs > own + NEAR).sum()) < token.rank <= 1 + int((logprobs > own - NEAR).sum())


def test_they_are_read_behind_a_cached_beginning_and_by_every_answer(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", prefix_cache_bytes=2**24)
    chat = families.example_messages("qwen2_vl", 1, text=LONG)
    engine.generate([Request(chat, Sampling(max_tokens=2))])
    (found,) = engine.generate([Request(chat, Sampling(max_tokens=2, prompt_logprobs=0, temperature=1.0), n=2)])
    first, second = (choice.prompt_logprobs for choice in found.choices)
    assert first is not None
    assert first == second
    assert len(first) == found.prompt_tokens - 1
    assert all(token.scored.top == () for token in first)


def test_a_vector_changes_them(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    mllm = engine.mllm
    ones = [torch.ones(mllm.num_layers) for _ in range(3)]
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(0))
    vector = steering.SteeringVector("drawn", direction, *ones, (1,), mllm.fingerprint)
    chat = families.example_messages("qwen2_vl", 1)
    sampling = Sampling(max_tokens=1, prompt_logprobs=0)
    plain, steered = engine.generate(
        [Request(chat, sampling), Request(chat, sampling, interventions=steering.Steer(vector, 4.0))]
    )
    assert plain.choices[0].prompt_logprobs != steered.choices[0].prompt_logprobs
