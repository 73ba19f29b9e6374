"""Intervals of what is measured on samples, and of differences between two ways of answering the same samples: Wilson's of
shares, all others from samples drawn anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 1000

Tallies = Mapping[str, np.ndarray]
"""What each sample adds to each of some sums: (samples,) by name."""
Scores = Callable[[Tallies], Mapping[str, np.ndarray]]
"""Metrics of sums, each of the shape of a sum; NaN where a metric does not exist."""


def interval(values: np.ndarray, seed: int = 0, statistic: Callable[..., Any] = np.mean) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, or of another numpy statistic, of one value a sample."""
    return bounds(statistic(values[_drawn(len(values), seed)], axis=1))


def paired(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares of the same samples: of the bootstrap, and where no resample differs
    the score interval. differences: (samples,), -1, 0 or 1 each."""
    found = interval(differences, seed)
    return found if found[0] < found[1] else _alike(float(differences[0]), len(differences))


def _alike(difference: float, samples: int) -> tuple[float, float]:
    """The score interval (Tango 1998) of a difference that is the same, -1, 0 or 1, in all of the samples: no resample
    differs, which does not say that nothing does. Twice as far from 1 as from 0, since both shares leave it."""
    beyond = wilson(0, samples)[1]
    if difference == 0:
        return -beyond, beyond
    return (1 - 2 * beyond, 1.0) if difference > 0 else (-1.0, 2 * beyond - 1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Between which the middle 95 % of the values lie, one a resample."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where `whole` is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0)


def check_statistics() -> None:
    """Raise ValueError where statsmodels is not installed, as in an environment without all that the package needs."""
    if find_spec("statsmodels") is None:
        raise ValueError("Intervals of shares need statsmodels: pip install statsmodels")


def wilson(counted: float, of: float) -> tuple[float, float]:
    """Wilson's 95 % interval of the share counted / of, of independent samples; `of` above 0, and need not be whole."""
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(counted, of, method="wilson")
    return float(low) if counted > 0 else 0.0, float(high) if counted < of else 1.0  # where rounding leaves 1e-16


def proportion(counted: int, of: int) -> dict[str, Any]:
    """A share with its Wilson interval; `value` is None of nothing."""
    if not of:
        return {"value": None, "value_95": None, "n": 0}
    return {"value": counted / of, "value_95": list(wilson(counted, of)), "n": of}


def deviation(value: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of the standard deviation (of a sample) of two values or more, as of a normal distribution."""
    from scipy.stats import chi2

    low, high = (value * math.sqrt((samples - 1) / chi2.ppf(tail, samples - 1)) for tail in (0.975, 0.025))
    return float(low), float(high)


def _drawn(samples: int, seed: int) -> np.ndarray:
    """(resamples, samples): which samples each resample holds."""
    return np.random.default_rng(seed).integers(samples, size=(RESAMPLES, samples))


class Share(NamedTuple):
    """A metric that is the share counted / of, by the names of the two sums. `fixed`: what it is a share of does not depend
    on the answers, and each sample adds 0 or 1 to either sum, so that McNemar's test compares two ways of answering."""

    counted: str
    of: str
    fixed: bool = True


@dataclass(frozen=True)
class Estimate:
    """A metric, and by how much it is above that of the plain answers; each None where it does not exist. Of a metric that
    is a fixed share of the samples, `p` is McNemar's and `turned` the share of those samples that count in one of both
    only."""

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
    shares: Mapping[str, Share] | None = None,
    clusters: Sequence[Any] | None = None,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Every metric of `scores` with its 95 % interval, and its difference to the `plain` answers to the same samples with
    the 95 % bootstrap interval of that: each resample holds the same samples of both. Of a fixed share that differs alike in
    all of them, so that no resample differs, it is the score interval of as many samples as there are clusters.

    shares: the metrics that are shares; their intervals are Wilson's, those of the others are of the bootstrap, too.
    clusters: what each sample belongs to; samples of one cluster (questions about one picture) are drawn together.
    """
    shares = shares or {}
    count = len(next(iter(found.values())))
    which = np.arange(count) if clusters is None else _numbered(clusters)
    groups = int(which.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), RESAMPLES)

    def measured(tallies: Tallies) -> tuple[Tallies, Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        grouped = {name: np.bincount(which, values, groups) for name, values in tallies.items()}
        return (
            grouped,
            scores({name: values.sum() for name, values in grouped.items()}),
            scores({name: drawn @ values for name, values in grouped.items()}),
        )

    grouped, values, resampled = measured(found)
    out = {}
    for name, value in values.items():
        share = shares.get(name)
        interval = _interval(resampled[name])
        if share is not None:
            interval = _wilson(grouped[share.counted], grouped[share.of], resampled[name])
        out[name] = Estimate(_known(value), interval)
    if plain is None:
        return out
    _, base, base_resampled = measured(plain)
    for name, value in values.items():
        out[name] = replace(
            out[name],
            difference=_known(value - base[name]),
            difference_interval=_interval(resampled[name] - base_resampled[name]),
        )
        if name in shares and shares[name].fixed:
            ours, theirs, samples = (
                found[shares[name].counted],
                plain[shares[name].counted],
                found[shares[name].of].sum(),
            )
            turned = float((ours != theirs).sum() / samples) if samples else None
            out[name] = replace(out[name], p=mcnemar(ours, theirs), turned=turned)
            counting = int((grouped[shares[name].of] > 0).sum())
            if counting and out[name].difference in (-1, 0, 1) and np.ptp(ours - theirs) == 0:
                out[name] = replace(out[name], difference_interval=_alike(float((ours - theirs)[0]), counting))
    return out


def _wilson(counted: np.ndarray, of: np.ndarray, resampled: np.ndarray) -> tuple[float, float] | None:
    """Of a share whose sums are (clusters,): where a cluster holds several, on as many independent samples as say as much
    (Kish 1965): their number over the design effect, the variance of the share over clusters drawn anew by that of
    independent samples."""
    n = float(of.sum())
    if not n:
        return None
    p, effect = float(counted.sum()) / n, 1.0
    if of.max() > 1 and 0 < p < 1:
        effect = max(1.0, float(np.nanvar(resampled)) / (p * (1 - p) / n))
    return wilson(p * n / effect, n / effect)


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
    """The exact two-sided p of McNemar's test that two ways of answering are right equally often. first, second: (samples,),
    0 or 1 each."""
    from statsmodels.stats import contingency_tables

    one, other = first > 0, second > 0
    table = [[(one & other).sum(), (one & ~other).sum()], [(~one & other).sum(), (~one & ~other).sum()]]
    return float(contingency_tables.mcnemar(np.array(table), exact=True).pvalue)


def detectable(turned: float, samples: int) -> float:
    """The least difference of two shares that a paired test on `samples` finds (5 %, two-sided) in four experiments of
    five, where a share of `turned` of the samples counts in one of both only. Normal approximation: 1.96 + 0.84 standard
    errors."""
    return (1.96 + 0.84) * math.sqrt(turned / samples)


def area(values: np.ndarray, wanted: np.ndarray, strata: np.ndarray | None = None) -> float:
    """How often a wanted sample has a greater value than another one (equal ones half): the area under the ROC curve; .5 is
    chance. With `strata`, only samples of one stratum are compared. NaN where there is nothing to compare."""
    return float(_areas(np.ones((1, len(values))), values, wanted, strata)[0])


def area_with_interval(
    values: np.ndarray, wanted: np.ndarray, strata: np.ndarray | None = None
) -> tuple[float, tuple[float, float]] | None:
    """`area` with its 95 % bootstrap interval, of the resamples in which it exists; None where there is nothing to
    compare."""
    whole = area(values, wanted, strata)

    def of(rows: np.ndarray, axis: int) -> np.ndarray:
        times = np.stack([np.bincount(row, minlength=len(values)) for row in rows])
        areas = _areas(times, values, wanted, strata)
        return areas[~np.isnan(areas)]

    return None if np.isnan(whole) else (whole, interval(np.arange(len(wanted)), statistic=of))


def _areas(times: np.ndarray, values: np.ndarray, wanted: np.ndarray, strata: np.ndarray | None) -> np.ndarray:
    """(resamples,): `area` of each. times: (resamples, samples), how often a sample is in it."""
    won, pairs = (np.zeros(len(times)) for _ in range(2))
    for stratum in (None,) if strata is None else np.unique(strata):
        chosen = np.arange(len(values)) if stratum is None else np.flatnonzero(strata == stratum)
        order = chosen[np.argsort(values[chosen], kind="stable")]
        first = np.unique(values[order], return_index=True)[1]  # of each value
        if not len(first):
            continue
        those, others = (np.add.reduceat(times[:, order] * one[order], first, axis=1) for one in (wanted, ~wanted))
        won += (those * (others.cumsum(1) - others / 2)).sum(1)
        pairs += those.sum(1) * others.sum(1)
    return np.divide(won, pairs, out=np.full(len(times), np.nan), where=pairs > 0)


def spearman(one: np.ndarray, other: np.ndarray) -> float | None:
    """Spearman's rank correlation of pairs, equal values having their mean rank; None where all of one side are equal."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, which, count = np.unique(values, return_inverse=True, return_counts=True)
        return (count.cumsum() - (count - 1) / 2)[which]

    found = ranks(one), ranks(other)
    return None if min(np.ptp(ranked) for ranked in found) == 0 else float(np.corrcoef(*found)[0, 1])


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
