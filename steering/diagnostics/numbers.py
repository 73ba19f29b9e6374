"""Measured numbers as JSON has them."""

from __future__ import annotations

import math

import torch


def known(values: torch.Tensor) -> list[float | None]:
    """values: (n,); None where a number does not exist, which is NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]
