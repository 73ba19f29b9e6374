"""Formulas that interventions and readouts share, and measured numbers as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def activation_maps(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """(tokens, patches): ReLU of the logit of each token at each image token (Token Activation Maps, see `readouts.tam`).

    states: (patches, d), normalised states after the last layer. head: (tokens, d), rows of the output embedding.
    """
    return (head.float() @ states.float().T).relu()


def known(values: torch.Tensor) -> list[float | None]:
    """values: (n,); None where a number does not exist, which is NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the numbers that exist, None where there are none."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How many numbers there are, their mean and the largest, both None where there are none."""
    return {"count": len(values), "mean": mean(values), "max": max(values, default=None)}
