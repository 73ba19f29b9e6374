"""Two plain runs that share nothing, combined token by token as a test says; and one batch of many methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

import steering
from tests.steering.interventions.references import SAMPLING, STEPS, only
from tests.steering.plain import Messages, Plain, uncached

Combine = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives the logits (vocabulary,) of a token from its number, from 0, and those of the prompt and of the twin's prompt."""


def combined_along(
    plain: Plain, full: Mapping[str, Any], twin: Mapping[str, Any], tokens: Sequence[int], combine: Combine
) -> tuple[torch.Tensor, int]:
    """Return log-probabilities (tokens, vocabulary) along an answer, and how many tokens the combination changed."""
    rows, changed = [], 0
    for step in range(len(tokens)):
        ours, theirs = (uncached(plain.model, inputs, tokens[:step]).logits[0, -1].float() for inputs in (full, twin))
        logits = combine(step, ours.double(), theirs.double())
        changed += int(logits.argmax()) != int(ours.argmax())
        rows.append(logits.log_softmax(-1).float())
    return torch.stack(rows), changed


def cut(logits: torch.Tensor, full: torch.Tensor, beta: float) -> torch.Tensor:
    """Return logits (vocabulary,) without the tokens that are less likely by `full` than beta times the likeliest."""
    return logits.masked_fill(full.softmax(-1) < beta * full.softmax(-1).max(), -math.inf)


def check_mixed(engine: steering.Engine, asked: Iterable[tuple[Messages, tuple[Any, ...]]]) -> None:
    """Check that every request has the same answer, numbers and report in one batch with the others as alone."""
    requests = [steering.Request(messages, SAMPLING, interventions) for messages, interventions in asked]
    together = [result.choices[0] for result in engine.generate(requests)]
    for request, choice in zip(requests, together, strict=True):
        alone = only(engine, request.messages, *request.interventions)  # type: ignore[arg-type]
        assert choice.token_ids == alone.token_ids
        assert len(choice.token_ids) == STEPS
        assert nearly(choice.applied) == nearly(alone.applied)
        for one, other in zip(choice.logprobs or (), alone.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert {top.token_id for top in one.top[:3]} == {top.token_id for top in other.top[:3]}


def nearly(report: Any) -> Any:
    """Return a report with its numbers rounded, to compare."""
    if isinstance(report, dict):
        return {name: nearly(value) for name, value in report.items()}
    if isinstance(report, list):
        return [nearly(value) for value in report]
    return round(report, 3) if isinstance(report, float) else report
