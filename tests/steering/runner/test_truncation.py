"""Truncation keeps the tokens that transformers keeps, whatever number of candidates tells which these are."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from steering.protocol.request import Sampling
from steering.runner import truncation
from steering.runner.sampler import SamplerRows
from steering.runner.truncation import Truncation, truncated

VOCABULARY = 20_000
LIMITS = (
    (0, 1.0, 0.0), (1, 1.0, 0.0), (256, 1.0, 0.0), (257, 1.0, 0.0), (9000, 1.0, 0.0), (30_000, 1.0, 0.0),
    (0, 0.5, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.02), (20, 0.8, 0.0), (300, 0.8, 0.0), (8192, 0.99, 0.01),
)  # fmt: skip
"""The top_k, top_p and min_p of rows."""


def limits() -> Truncation:
    top_k, top_p, min_p = (torch.tensor(part)[:, None] for part in zip(*LIMITS, strict=True))
    return Truncation(top_k, top_p, min_p)


def by_transformers(scaled: torch.Tensor) -> torch.Tensor:
    ids, rows = torch.zeros(1, 0, dtype=torch.int64), []
    for row, (top_k, top_p, min_p) in zip(scaled.double(), LIMITS, strict=True):  # in float32 its sums are rounded
        kept = row[None]
        if top_k:
            kept = TopKLogitsWarper(top_k)(ids, kept)
        if top_p < 1:
            kept = TopPLogitsWarper(top_p)(ids, kept)
        if min_p:
            kept = MinPLogitsWarper(min_p)(ids, kept)
        rows.append(kept)
    return torch.cat(rows).isfinite()


def logits(kind: str) -> torch.Tensor:
    drawn = torch.randn(len(LIMITS), VOCABULARY, generator=torch.Generator().manual_seed(1))
    return {
        "flat": drawn,
        "peaked": 6 * drawn,
        "ties": (4 * drawn).round(),
        "few": drawn.masked_fill(drawn < 2.5, -torch.inf),
    }[kind]


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "few"])
def test_the_tokens_that_transformers_keeps_are_kept(kind: str) -> None:
    scaled = logits(kind)
    ours, theirs = truncated(scaled, limits()), by_transformers(scaled)
    if kind == "ties":  # of tokens of equal logits, transformers' top_p keeps some, in no order
        theirs = scaled >= scaled.masked_fill(~theirs, torch.inf).amin(-1, keepdim=True)
    assert torch.equal(ours.isfinite(), theirs)
    assert torch.equal(ours[ours.isfinite()], scaled[ours.isfinite()])


def test_tokens_that_equal_the_last_candidate_are_kept_with_it() -> None:
    scaled = torch.zeros(1, VOCABULARY)
    scaled[0, 0] = 5.0
    (kept,) = truncated(
        scaled, Truncation(torch.tensor([[20]]), torch.tensor([[0.3]]), torch.tensor([[0.0]]))
    ).isfinite()
    assert bool(kept.all())


def test_a_row_is_truncated_as_if_it_were_alone() -> None:
    scaled = logits("peaked")
    together = truncated(scaled, limits())
    for row in range(len(LIMITS)):
        alone = torch.tensor([row])
        assert torch.equal(truncated(scaled[alone], limits().of(alone))[0], together[row])


def test_only_rows_that_few_candidates_do_not_settle_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    among = truncation._among

    def counted(ordered: torch.Tensor, scaled: torch.Tensor, limits: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
        tried.append(tuple(ordered.shape))
        return among(ordered, scaled, limits)

    monkeypatch.setattr(truncation, "_among", counted)
    truncated(logits("peaked")[:4], limits().of(torch.arange(4)))
    assert tried == [(4, 256), (1, 8192)], "one keeps 257 tokens"
    tried.clear()
    truncated(logits("flat"), limits())
    assert [shape[1] for shape in tried] == [256, 8192, VOCABULARY]
    assert len(LIMITS) > tried[1][0] > tried[2][0] > 0


def test_a_greedy_row_is_not_truncated() -> None:
    rows = SamplerRows(1, VOCABULARY, [0], torch.device("cpu"))
    nothing = torch.zeros(0, dtype=torch.int64)
    rows.place(0, Sampling(temperature=0, top_p=0.5, top_k=300, min_p=0.5), 0, nothing, nothing)
    assert [float(limit) for limit in rows.limits(slice(0, 1))] == [0, 1, 0]


@pytest.mark.parametrize("top_p", [1e-46, 5e-324, 1e-38])
def test_the_least_top_p_keeps_the_likeliest_token(top_p: float) -> None:
    rows, nothing = SamplerRows(1, VOCABULARY, [0], torch.device("cpu")), torch.zeros(0, dtype=torch.int64)
    rows.place(0, Sampling(temperature=1.0, top_p=top_p), 0, nothing, nothing)
    scaled = logits("peaked")[:1]
    assert truncated(scaled, rows.limits(slice(0, 1)))[0].isfinite().nonzero().tolist() == [[int(scaled.argmax())]]


@pytest.mark.parametrize("offset", [-400.0, 25.0, 5000.0])
def test_large_logits_lose_no_precision(offset: float) -> None:
    """Next to float64's, whose mass differs by what float32 rounds in logits."""
    scaled = (logits("flat") + offset)[:5]
    top_p = torch.tensor([[0.5], [0.9], [0.99], [0.999], [0.9999]])
    ours = truncated(scaled, Truncation(torch.zeros(5, 1, dtype=torch.int64), top_p, torch.zeros(5, 1))).isfinite()
    mass, least = scaled.double().softmax(-1), scaled.masked_fill(~ours, torch.inf).amin(-1, keepdim=True)
    assert bool(((mass * ours).sum(-1, keepdim=True) > top_p - 2e-6).all())
    assert bool(((mass * (scaled > least)).sum(-1, keepdim=True) < top_p + 2e-6).all())
