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


def gap_closed(
    plain: np.ndarray, prior: np.ndarray, auto: np.ndarray, seed: int = 0
) -> tuple[float, tuple[float, float]] | None:
    """(auto - plain) / (prior - plain) of the means, and its 95 % bootstrap interval; all three are one value a sample, and
    the samples are drawn together. None where the gap between prior and plain could as well be none: there is nothing to
    close."""
    gap, gained = prior - plain, auto - plain
    if interval(gap, seed)[0] <= 0:
        return None
    drawn = np.random.default_rng(seed).integers(len(gap), size=(RESAMPLES, len(gap)))
    gaps, gains = gap[drawn].mean(1), gained[drawn].mean(1)
    low, high = np.quantile(gains[gaps > 0] / gaps[gaps > 0], (0.025, 0.975))
    return float(gained.mean() / gap.mean()), (float(low), float(high))
