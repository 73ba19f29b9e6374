"""An answer of a least length: its end cannot be chosen before."""

from __future__ import annotations

import torch
from transformers import MinNewTokensLengthLogitsProcessor

from steering.protocol.request import Sampling
from steering.runner.sampler import Needs, sample
from tests.steering.runner.test_sampler import STOPS, plain_rows


def test_an_answer_does_not_end_before_its_least_length() -> None:
    """The reference is transformers' MinNewTokensLengthLogitsProcessor, row by row; greedy answers would end at once."""
    settings = [Sampling(), Sampling(min_tokens=2), Sampling(min_tokens=2, temperature=1.0, top_k=2)]
    rows, logits = plain_rows(settings)
    logits[:, STOPS] = 50.0
    for generated in range(4):
        positions = torch.full((3,), 1 + generated)  # behind a prompt of one token
        sampled = sample(logits, rows, slice(0, 3), positions, Needs.of(settings))
        ends = torch.isin(sampled.tokens, torch.tensor(STOPS)).tolist()
        assert ends == [True, generated >= 2, generated >= 2]
        expected = MinNewTokensLengthLogitsProcessor(1, 2, list(STOPS), device="cpu")(
            torch.zeros(3, 1 + generated, dtype=torch.int64), logits.clone()
        )
        assert int(sampled.tokens[1]) == int(expected[1].argmax())
    assert bool(sampled.finite.all())
