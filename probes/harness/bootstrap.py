"""Intervals of what is measured on samples, from samples drawn anew, and of differences between two ways of answering the
same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

RESAMPLES = 1000

Tallies = Mapping[str, np.ndarray]
"""What each sample adds to each of some sums: (samples,) by name."""
Scores = Callable[[Tallies], Mapping[str, np.ndarray]]
"""Metrics of sums, each of the shape of a sum; NaN where a metric does not exist."""


def interval(values: np.ndarray, seed: int = 0, statistic: Callable[..., Any] = np.mean) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, or of another numpy statistic, of one value a sample."""
    return bounds(statistic(values[_drawn(len(values), seed)], axis=1))


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Between which the middle 95 % of the values lie, one a resample."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def resampled_counts(counts: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """(resamples, categories): how often each category is drawn where samples are drawn anew with replacement. counts:
    (categories,), how many samples there are of each."""
    return np.random.default_rng(seed).multinomial(counts.sum(), counts / counts.sum(), resamples)


def _drawn(samples: int, seed: int) -> np.ndarray:
    """(resamples, samples): which samples each resample holds."""
    return np.random.default_rng(seed).integers(samples, size=(RESAMPLES, samples))


@dataclass(frozen=True)
class Estimate:
    """A metric, and by how much it is above that of the plain answers; each None where it does not exist. Of a metric that
    is a share of the samples, `p` is McNemar's and `turned` the share of those samples that count in one of both only."""

    value: float | None
    interval: tuple[float, float] | None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None
    p: float | None = None
    turned: float | None = None

    def to_json(self) -> dict[str, Any]:
        """`value`, `value_95` and, beside plain answers, `difference`, `difference_95`, `p` and `turned`."""
        plain = {"value": self.value, "value_95": self.interval and list(self.interval)}
        if self.difference is None:
            return plain
        bounds = self.difference_interval and list(self.difference_interval)
        return plain | {
            "difference": self.difference, "difference_95": bounds, "p": self.p, "turned": self.turned,
        }  # fmt: skip


def estimates(
    found: Tallies,
    scores: Scores,
    plain: Tallies | None = None,
    *,
    shares: Mapping[str, tuple[str, str]] | None = None,
    clusters: Sequence[Any] | None = None,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Every metric of `scores` with its 95 % bootstrap interval, and its difference to the `plain` answers to the same
    samples with the interval of that: each resample holds the same samples of both.

    shares: for metrics that are shares of samples the names of the sums that count them and those that they are a share of
    (0 or 1 a sample each), for McNemar's test. clusters: what each sample belongs to; samples of one cluster (questions
    about one picture) are drawn together.
    """
    count = len(next(iter(found.values())))
    which = np.arange(count) if clusters is None else _numbered(clusters)
    groups = int(which.max()) + 1
    drawn = resampled_counts(np.ones(groups, int), seed=seed)

    def measured(tallies: Tallies) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        grouped = {name: np.bincount(which, values, groups) for name, values in tallies.items()}
        return (
            scores({name: values.sum() for name, values in grouped.items()}),
            scores({name: drawn @ values for name, values in grouped.items()}),
        )

    values, resampled = measured(found)
    if plain is None:
        return {name: Estimate(_known(value), _interval(resampled[name])) for name, value in values.items()}
    base, base_resampled = measured(plain)
    out = {}
    for name, value in values.items():
        out[name] = Estimate(
            _known(value),
            _interval(resampled[name]),
            _known(value - base[name]),
            _interval(resampled[name] - base_resampled[name]),
        )
        if shares and name in shares:
            counted, of = shares[name]
            ours, theirs, samples = found[counted], plain[counted], float(found[of].sum())
            turned = float((ours != theirs).sum()) / samples if samples else None
            out[name] = replace(out[name], p=mcnemar(ours, theirs), turned=turned)
    return out


def _numbered(clusters: Sequence[Any]) -> np.ndarray:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])


def _known(value: np.ndarray) -> float | None:
    return None if np.isnan(value) else float(value)


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    """Over the resamples in which the metric exists."""
    known = values[~np.isnan(values)]
    return bounds(known) if len(known) else None


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """The exact two-sided p of McNemar's test that two ways of answering are right equally often: a binomial test of the
    samples that only one of them gets right. first, second: (samples,), 0 or 1 each."""
    only_first, only_second = int(((first > 0) & (second <= 0)).sum()), int(((second > 0) & (first <= 0)).sum())
    changed = only_first + only_second
    tail = sum(math.comb(changed, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**changed)


def detectable(turned: float, samples: int) -> float:
    """The least difference of two shares that a paired test on `samples` finds (5 %, two-sided) in four experiments of
    five, where a share of `turned` of the samples counts in one of both only. Normal approximation: 1.96 + 0.84 standard
    errors."""
    return (1.96 + 0.84) * math.sqrt(turned / samples)


def area(values: np.ndarray, wanted: np.ndarray, strata: np.ndarray | None = None) -> float:
    """How often a wanted sample has a greater value than another one (equal ones half): the area under the ROC curve; .5 is
    chance. With `strata`, only samples of one stratum are compared. NaN where there is nothing to compare."""
    won = pairs = 0.0
    for stratum in (None,) if strata is None else np.unique(strata):
        chosen = slice(None) if stratum is None else strata == stratum
        some, those = values[chosen], wanted[chosen]
        order, others = np.sort(some[~those]), int((~those).sum())
        below, upto = (np.searchsorted(order, some[those], side) for side in ("left", "right"))
        won += float((below + upto).sum()) / 2
        pairs += others * int(those.sum())
    return won / pairs if pairs else math.nan


def gap_closed(
    plain: np.ndarray, prior: np.ndarray, auto: np.ndarray, seed: int = 0
) -> tuple[float, tuple[float, float]] | None:
    """(auto - plain) / (prior - plain) of the means, and its 95 % bootstrap interval; all three are one value a sample, and
    the samples are drawn together. None where the gap between prior and plain could as well be none: there is nothing to
    close."""
    gap, gained = prior - plain, auto - plain
    if interval(gap, seed)[0] <= 0:
        return None
    drawn = _drawn(len(gap), seed)
    gaps, gains = gap[drawn].mean(1), gained[drawn].mean(1)
    return float(gained.mean() / gap.mean()), bounds(gains[gaps > 0] / gaps[gaps > 0])
