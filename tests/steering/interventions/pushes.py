"""Vectors to push with, and what a push adds, by hand."""

from __future__ import annotations

import torch

from steering import (
    MLLM,
    Choice,
    Sampling,
    SteeringVector,
)
from tests import families
from tests.steering.plain import Answer, Messages

STEPS = 4
SAMPLING = Sampling(max_tokens=STEPS, logprobs=20, ignore_eos=True)


def make_vector(mllm: MLLM, name: str = "test", *, seed: int = 0, layers: tuple[int, ...] = (0, 2)) -> SteeringVector:
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=generator)
    weight = torch.rand(mllm.num_layers, generator=generator) + 0.2
    unit = torch.ones(mllm.num_layers)
    return SteeringVector(name, direction, weight, unit, unit, layers, mllm.fingerprint)


def unit_vector(mllm: MLLM, seed: int = 0, layers: tuple[int, ...] = (1,), name: str = "v") -> SteeringVector:
    """Return a random direction whose weights are 1."""
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(seed))
    unit = torch.ones(mllm.num_layers)
    return SteeringVector(name, direction, unit, unit, unit, layers, mllm.fingerprint)


def by_hand(vector: SteeringVector, scale: float, layers: tuple[int, ...]) -> torch.Tensor:
    """Return c * w_l * v_l at the given layers, (layers, d)."""
    delta = torch.zeros_like(vector.direction)
    for layer in layers:
        delta[layer] = scale * vector.weight[layer] * vector.direction[layer]
    return delta


def assert_same(choice: Choice, answer: Answer) -> None:
    assert list(choice.token_ids) == answer.tokens
    assert choice.logprobs is not None
    for row, token in zip(answer.logprobs, choice.logprobs, strict=True):
        reported = torch.tensor([alternative.logprob for alternative in token.top])
        expected = row[[alternative.token_id for alternative in token.top]]
        torch.testing.assert_close(reported, expected, rtol=0, atol=1e-4)


def chat(family: str, images: int = 2) -> Messages:
    return families.example_messages(family, images, system="You are a helpful assistant.")
