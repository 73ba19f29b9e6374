"""Intervals of what is measured on samples, from samples drawn anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES = 1000


def interval(values: np.ndarray, seed: int = 0, statistic: Callable[..., Any] = np.mean) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, or of another numpy statistic, of one value a sample."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[drawn], axis=1), (0.025, 0.975))
    return float(low), float(high)
