"""Formulas that interventions and readouts share, and the JSON form of measured numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def activation_maps(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return (tokens, patches): ReLU of the logit of each token at each image token (Token Activation Maps).

    states: (patches, d), normalised states after the last layer. head: (tokens, d), rows of the output embedding.
    """
    return (head.float() @ states.float().T).relu()


def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """Return D in nats, (...), of a layer's updates (..., d): KL(softmax(mha) || softmax(ffn)) (SAGE paper, section 5.1)."""
    p, q = mha.float().log_softmax(-1), ffn.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def nan_to_none(values: torch.Tensor) -> list[Any]:
    """Return values (n, ...) as lists, with None for NaN, which marks numbers that do not exist."""
    nested: list[Any] = values.tolist()
    return _without_nan(nested) if bool(values.isnan().any()) else nested


def _without_nan(values: list[Any]) -> list[Any]:
    return [
        _without_nan(value) if isinstance(value, list) else None if math.isnan(value) else value for value in values
    ]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the numbers that exist, None where there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the count of numbers, their mean and the largest, both None where there are none."""
    return {"count": len(values), "mean": mean(values), "max": max(values, default=None)}
