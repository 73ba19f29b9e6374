"""The question of whether groups differ at all, which the extremes of many groups always seem to say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.stats import chi2

from probes.reproduce.items import Figure

NORMAL = 1.959963984540054
"""The normal quantile of a 95 % interval."""
LEVEL = 0.05
"""The level at which groups count as different."""


def samples_behind(share: Figure) -> float:
    """Return the number of independent samples that a share's Wilson interval says as much as.

    The interval's ends are the roots of (1 + t) x^2 - (2 p + t) x + p^2, where t is z^2 / n; so their product is
    p^2 / (1 + t), and likewise for 1 - p. Raises ValueError if there is no interval.
    """
    if share.interval is None:
        raise ValueError("a share without an interval says of no number of samples")
    low, high = share.interval
    p = float(share.value)
    t = p**2 / (low * high) - 1 if p > 0.5 else (1 - p) ** 2 / ((1 - low) * (1 - high)) - 1
    return NORMAL**2 / t


def alike(shares: Iterable[Figure]) -> float:
    """Return the p of Pearson's chi-square test that all groups have one share; 1 for fewer than two groups.

    It is of all groups at once, so that it needs no correction for choosing the lowest and the highest.
    """
    groups = [(float(share.value), samples_behind(share)) for share in shares]
    values, sizes = (np.array(column) for column in zip(*groups, strict=True)) if groups else (np.zeros(0),) * 2
    pooled = float(values @ sizes / sizes.sum()) if groups else 0.0
    if len(groups) < 2 or pooled in (0.0, 1.0):
        return 1.0
    statistic: Any = (sizes * (values - pooled) ** 2).sum() / (pooled * (1 - pooled))
    return float(chi2.sf(statistic, len(groups) - 1))
