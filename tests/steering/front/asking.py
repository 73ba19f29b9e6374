"""Chats that an engine is asked, and what its answers must be equal to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from steering import Choice, Completion, Engine, Sampling
from steering.protocol.result import Result
from tests import families
from tests.steering.plain import Answer, Messages

LONG = "Look at the image and think step by step. How many people are in the second image? " * 4


def user(text: str) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def conversations(family: str) -> list[Messages]:
    """Ragged: no, one, two and three images, short and long texts, a system prompt, several turns."""
    example = families.example_messages
    chats = [
        example(family, 1),
        example(family, 2, text=LONG, system="Answer with one word."),
        example(family, 3, text="Why?", seed=1),
        [
            *example(family, 1, seed=2),
            {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]},
            *user("Are you sure? There are two balls."),
        ],
    ]
    return chats if family in families.IMAGE_ONLY else [*chats, user("How many people are there?"), user(LONG)]


def greedy(steps: int = 6, **options: Any) -> Sampling:
    return Sampling(max_tokens=steps, logprobs=20, ignore_eos=True, **options)


def begun(answer: Answer, steps: int) -> Answer:
    """Return the first tokens of a longer greedy answer, with the measurements up to the last of them."""
    assert steps <= len(answer.tokens)
    fed = answer.prompt_length + steps - 1
    return replace(
        answer,
        tokens=answer.tokens[:steps],
        logits=answer.logits[:steps],
        attention=answer.attention[:, :fed, :fed],
        hidden=answer.hidden[:, :fed],
    )


def assert_same(choice: Choice, answer: Answer) -> None:
    """Check for equal tokens, and log-probabilities of each one's twenty best alternatives within 1e-4."""
    assert list(choice.token_ids) == answer.tokens
    assert choice.logprobs is not None
    for row, token in zip(answer.logprobs, choice.logprobs, strict=True):
        best = row.topk(20)
        reported = torch.tensor([alternative.logprob for alternative in token.top])
        torch.testing.assert_close(reported, best.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(row[[other.token_id for other in token.top]], reported, rtol=0, atol=1e-4)
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)


def exact(choice: Choice) -> tuple[Any, ...]:
    """Everything of a choice that must not depend on its neighbours, log-probabilities to the last bit."""
    return choice.text, choice.token_ids, choice.finish_reason, choice.logprobs, choice.applied, choice.diagnostics


def sigma(choice: Choice) -> torch.Tensor:
    assert choice.diagnostics is not None
    return torch.tensor(choice.diagnostics["focus"]["sigma"])


def run_down(engine: Engine, completion: Completion) -> Result:
    """Step until a request is done."""
    while not completion.done:
        engine.step()
    return completion.result()
