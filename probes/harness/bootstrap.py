"""Confidence intervals of metrics, and of differences between two ways of answering the same samples.

Shares have Wilson's intervals; all other metrics have bootstrap intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 1000

Tallies = Mapping[str, np.ndarray]
"""The contribution of each sample to each of several sums: (samples,) by name."""
Scores = Callable[[Tallies], Mapping[str, np.ndarray]]
"""Metrics computed from sums, each in the shape of a sum; NaN where a metric is undefined."""


def interval(values: np.ndarray, seed: int = 0, statistic: Callable[..., Any] = np.mean) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean, or of another numpy statistic, of one value per sample."""
    return bounds(statistic(values[_draw(len(values), seed)], axis=1))


def paired(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same samples.

    The interval is the bootstrap's, or the score interval where no resample differs. differences: (samples,), each -1, 0 or
    1.
    """
    bounds_of_mean = interval(differences, seed)
    return bounds_of_mean if bounds_of_mean[0] < bounds_of_mean[1] else _alike(float(differences[0]), len(differences))


def _alike(difference: float, samples: int) -> tuple[float, float]:
    """Return the score interval (Tango 1998) of a difference that is the same, -1, 0 or 1, in all samples.

    No resample differs then, which does not show that there is no variation. The bound is twice as far from 1 as from 0,
    since both shares move away from it.
    """
    beyond = wilson(0, samples)[1]
    if difference == 0:
        return -beyond, beyond
    return (1 - 2 * beyond, 1.0) if difference > 0 else (-1.0, 2 * beyond - 1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of the values, one value per resample."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def ratio(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return part / total, with NaN where `total` is 0."""
    return np.divide(part, total, out=np.full(np.shape(total), np.nan), where=np.asarray(total) > 0)


def check_statistics() -> None:
    """Raise ValueError if statsmodels is not installed, as in an environment without all dependencies."""
    if find_spec("statsmodels") is None:
        raise ValueError("Intervals of shares need statsmodels: pip install statsmodels")


def wilson(counted: float, of: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share counted / of, of independent samples.

    `of` must be above 0 and need not be whole.
    """
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(counted, of, method="wilson")
    return float(low) if counted > 0 else 0.0, float(high) if counted < of else 1.0  # instead of 1e-16 by rounding


def proportion(counted: int, of: int) -> dict[str, Any]:
    """Return a share with its Wilson interval; `value` is None if `of` is 0."""
    if not of:
        return {"value": None, "value_95": None, "n": 0}
    return {"value": counted / of, "value_95": list(wilson(counted, of)), "n": of}


def deviation(value: float, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the sample standard deviation of two or more values, assuming a normal distribution."""
    from scipy.stats import chi2

    low, high = (value * math.sqrt((samples - 1) / chi2.ppf(tail, samples - 1)) for tail in (0.975, 0.025))
    return float(low), float(high)


def _draw(samples: int, seed: int) -> np.ndarray:
    """Draw the samples of each resample: indices (resamples, samples)."""
    return np.random.default_rng(seed).integers(samples, size=(RESAMPLES, samples))


class Share(NamedTuple):
    """A metric that is the share counted / of; both are names of sums.

    `fixed`: the denominator does not depend on the answers, and each sample adds 0 or 1 to either sum, so that McNemar's
    test compares two ways of answering.
    """

    counted: str
    of: str
    fixed: bool = True


@dataclass(frozen=True)
class Estimate:
    """A metric and its difference to that of the plain answers; each is None where it is undefined.

    An interval is also None where no resample differs and there is no score interval. For a metric that is a fixed share of
    the samples, `p` is McNemar's p and `turned` the share of those samples that count in exactly one of the two.
    """

    value: float | None
    interval: tuple[float, float] | None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None
    p: float | None = None
    turned: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return `value` and `value_95`, and beside plain answers `difference`, `difference_95`, `p` and `turned`."""
        plain = {"value": self.value, "value_95": self.interval and list(self.interval)}
        if self.difference is None:
            return plain
        bounds = self.difference_interval and list(self.difference_interval)
        return plain | {
            "difference": self.difference, "difference_95": bounds, "p": self.p, "turned": self.turned,
        }  # fmt: skip


def estimates(
    tallies: Tallies,
    scores: Scores,
    plain: Tallies | None = None,
    *,
    shares: Mapping[str, Share] | None = None,
    clusters: Sequence[Any] | None = None,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Return every metric of `scores` with its 95 % interval and its difference to the `plain` answers to the same samples.

    The difference has a 95 % bootstrap interval, for which each resample holds the same samples of both. If a share of the
    same samples differs alike in all of them, so that no resample differs, it has the score interval of as many samples as
    there are clusters.

    shares: the metrics that are shares; their intervals are Wilson's. The intervals of the others are bootstrap intervals,
    too. clusters: the cluster of each sample; samples of one cluster (questions about one picture) are drawn together.
    """
    shares = shares or {}
    count = len(next(iter(tallies.values())))
    group_of = np.arange(count) if clusters is None else number_clusters(clusters)
    groups = int(group_of.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), RESAMPLES)

    def measured(tallies: Tallies) -> tuple[Tallies, Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        grouped = {name: np.bincount(group_of, values, groups) for name, values in tallies.items()}
        return (
            grouped,
            scores({name: values.sum(axis=0) for name, values in grouped.items()}),
            scores({name: drawn @ values for name, values in grouped.items()}),
        )

    grouped, values, resampled = measured(tallies)
    out = {}
    for name, value in values.items():
        share = shares.get(name)
        interval = _interval(resampled[name])
        if share is not None:
            interval = _wilson(grouped[share.counted], grouped[share.of], resampled[name])
        out[name] = Estimate(_finite(value), interval)
    if plain is None:
        return out
    _, base, base_resampled = measured(plain)
    for name, value in values.items():
        out[name] = replace(
            out[name],
            difference=_finite(value - base[name]),
            difference_interval=_interval(resampled[name] - base_resampled[name]),
        )
        if (share := shares.get(name)) is None:
            continue
        ours, theirs, of = tallies[share.counted], plain[share.counted], tallies[share.of]
        if share.fixed:
            turned = float((ours != theirs).sum() / of.sum()) if of.any() else None
            out[name] = replace(out[name], p=mcnemar(ours, theirs), turned=turned)
        difference, counting = out[name].difference, _counting(grouped[share.of])
        same_samples = counting > 0 and np.array_equal(of, plain[share.of])
        if same_samples and difference in (-1, 0, 1) and np.array_equal(ours - theirs, difference * of):
            out[name] = replace(out[name], difference_interval=_alike(difference, counting))
    return out


def _counting(of: np.ndarray) -> int:
    """Return how many clusters hold any sample that counts."""
    return int((of > 0).sum())


def _wilson(counted: np.ndarray, of: np.ndarray, resampled: np.ndarray) -> tuple[float, float] | None:
    """Return Wilson's interval of a share whose sums are (clusters,).

    If a cluster holds several samples, the interval is that of the effective number of independent samples (Kish 1965):
    their number divided by the design effect, which is the variance of the share over resampled clusters divided by that of
    independent samples. Where no resample can differ, because all samples or none are counted or there is one cluster, it is
    that of the number of clusters.
    """
    n = float(of.sum())
    if not n:
        return None
    p, effect, counting = float(counted.sum()) / n, 1.0, _counting(of)
    if counting == 1 or p in (0, 1):
        effect = max(1.0, n / counting)
    elif of.max() > 1:
        effect = max(1.0, float(np.nanvar(resampled)) / (p * (1 - p) / n))
    return wilson(p * n / effect, n / effect)


def number_clusters(clusters: Sequence[Any]) -> np.ndarray:
    """Return the number of each sample's cluster, in the order of their first samples."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])


def _finite(value: np.ndarray) -> float | None:
    return None if np.isnan(value) else float(value)


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    """Return the interval over the resamples in which the metric is defined, None if these do not differ."""
    defined = values[~np.isnan(values)]
    low, high = bounds(defined) if len(defined) else (0.0, 0.0)
    return (low, high) if high - low > 1e-9 else None  # equal quotients may differ by rounding


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """Return the exact two-sided p of McNemar's test that two ways of answering are right equally often.

    first, second: (samples,), each 0 or 1.
    """
    from statsmodels.stats import contingency_tables

    in_first, in_second = first > 0, second > 0
    table = [
        [(in_first & in_second).sum(), (in_first & ~in_second).sum()],
        [(~in_first & in_second).sum(), (~in_first & ~in_second).sum()],
    ]
    return float(contingency_tables.mcnemar(np.array(table), exact=True).pvalue)


def detectable(turned: float, samples: int) -> float:
    """Return the least difference of two shares that a paired test on `samples` finds (5 %, two-sided) with a power of 80 %.

    turned: the share of the samples that count in exactly one of the two. Normal approximation: 1.96 + 0.84 standard errors.
    """
    return (1.96 + 0.84) * math.sqrt(turned / samples)


def area(values: np.ndarray, is_wanted: np.ndarray, strata: np.ndarray | None = None) -> float:
    """Return the area under the ROC curve: how often a wanted sample has a greater value than another (ties count half).

    0.5 is chance. With `strata`, only samples of one stratum are compared. NaN if there is nothing to compare.
    """
    return float(areas(np.ones((1, len(values))), values, is_wanted, strata)[0])


def area_with_interval(
    values: np.ndarray, is_wanted: np.ndarray, strata: np.ndarray | None = None
) -> tuple[float, tuple[float, float]] | None:
    """Return `area` with its 95 % bootstrap interval over the resamples in which it is defined.

    None if there is nothing to compare. Where every pair compares alike, no resample differs: the interval is then Wilson's,
    of as many independent pairs as there are.
    """
    whole_area = area(values, is_wanted, strata)

    def of(rows: np.ndarray, axis: int) -> np.ndarray:
        times = np.stack([np.bincount(row, minlength=len(values)) for row in rows])
        drawn = areas(times, values, is_wanted, strata)
        return drawn[~np.isnan(drawn)]

    if np.isnan(whole_area):
        return None
    if whole_area in (0.0, 1.0):
        parts = [np.ones(len(values), bool)] if strata is None else [strata == stratum for stratum in np.unique(strata)]
        pairs = sum(min(int(is_wanted[part].sum()), int((~is_wanted)[part].sum())) for part in parts)
        return whole_area, wilson(whole_area * pairs, pairs)
    return whole_area, interval(np.arange(len(is_wanted)), statistic=of)


def areas(times: np.ndarray, values: np.ndarray, is_wanted: np.ndarray, strata: np.ndarray | None = None) -> np.ndarray:
    """Return the `area` of each resample: (resamples,).

    times: (resamples, samples), how often a sample occurs in a resample.
    """
    won, pairs = (np.zeros(len(times)) for _ in range(2))
    for stratum in (None,) if strata is None else np.unique(strata):
        chosen = np.arange(len(values)) if stratum is None else np.flatnonzero(strata == stratum)
        order = chosen[np.argsort(values[chosen], kind="stable")]
        first = np.unique(values[order], return_index=True)[1]  # the first place of each value
        if not len(first):
            continue
        wanted_weights, other_weights = (
            np.add.reduceat(times[:, order] * selected[order], first, axis=1) for selected in (is_wanted, ~is_wanted)
        )
        won += (wanted_weights * (other_weights.cumsum(1) - other_weights / 2)).sum(1)
        pairs += wanted_weights.sum(1) * other_weights.sum(1)
    return np.divide(won, pairs, out=np.full(len(times), np.nan), where=pairs > 0)


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return Spearman's rank correlation of pairs; ties share their mean rank. None if all values of one side are equal."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, rank_of, count = np.unique(values, return_inverse=True, return_counts=True)
        return (count.cumsum() - (count - 1) / 2)[rank_of]

    rank_pair = ranks(first), ranks(second)
    return None if min(np.ptp(ranked) for ranked in rank_pair) == 0 else float(np.corrcoef(*rank_pair)[0, 1])


def gap_closed(
    plain: np.ndarray, prior: np.ndarray, auto: np.ndarray, seed: int = 0
) -> tuple[float, tuple[float, float]] | None:
    """Return (auto - plain) / (prior - plain) of the means, with its 95 % bootstrap interval.

    All three hold one value per sample, and the samples are drawn together. None if the gap between prior and plain may be
    zero: then there is nothing to close.
    """
    gap, gained = prior - plain, auto - plain
    if interval(gap, seed)[0] <= 0:
        return None
    drawn = _draw(len(gap), seed)
    gaps, gains = gap[drawn].mean(1), gained[drawn].mean(1)
    return float(gained.mean() / gap.mean()), bounds(gains[gaps > 0] / gaps[gaps > 0])


Statistic = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def best_accuracies(times: np.ndarray, values: np.ndarray, is_yes: np.ndarray) -> np.ndarray:
    """Return the accuracy at the threshold that gives the greatest one, of each resample: (resamples,).

    times: (resamples, samples), how often a sample occurs in a resample. Values from the threshold on are answered yes. The
    threshold is chosen on the same samples, so the accuracy is an upper bound of one that is set beforehand.
    """
    order = np.argsort(values, kind="stable")
    weights, positive = times[:, order], is_yes[order]
    # Right answers with the threshold behind the first k samples: the no among these and the yes among the others.
    right = np.cumsum(np.where(positive, -weights, weights), axis=1)
    right = np.concatenate([np.zeros((len(times), 1)), right], 1) + (weights * positive).sum(1, keepdims=True)
    ends = np.flatnonzero(np.diff(values[order], append=np.inf)) + 1  # no threshold parts equal values
    return right[:, [0, *ends]].max(1) / weights.sum(1)


STATISTICS: Mapping[str, Statistic] = {"auroc": areas, "best_accuracy": best_accuracies}


def ranked(
    scores: Sequence[float | None],
    truths: Sequence[bool],
    clusters: Sequence[Any],
    plain: Sequence[float | None] | None = None,
    *,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Return `auroc` and `best_accuracy` as JSON of an `Estimate`, compared with the plain scores of the same questions.

    auroc: how often a question to be answered yes has a greater score than one to be answered no. Questions without a score
    in either are left out; both are undefined if one of the two kinds is missing. clusters: questions of one are drawn
    together. An interval is None where no resample differs, except that of an AUROC of 0 or 1: it is Wilson's, of as many
    independent pairs as there are clusters with the rarer kind.
    """
    ways_given = [way for way in (scores, plain) if way is not None]
    both = [index for index in range(len(scores)) if all(way[index] is not None for way in ways_given)]
    is_yes = np.array([truths[index] for index in both], dtype=bool)
    if not both or is_yes.all() or not is_yes.any():
        return {name: Estimate(None, None).to_json() for name in STATISTICS}
    group_of = number_clusters([clusters[index] for index in both])
    groups = int(group_of.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), RESAMPLES)
    times = np.concatenate([np.ones((1, len(both)), int), drawn[:, group_of]])
    ways = [np.array([way[index] for index in both], dtype=float) for way in ways_given]
    out = {}
    for name, statistic in STATISTICS.items():
        now, *before = (statistic(times, way, is_yes) for way in ways)  # the first is of all samples
        estimate = Estimate(float(now[0]), _interval(now[1:]))
        if name == "auroc" and estimate.value in (0, 1):
            pairs = min(len(set(group_of[kind])) for kind in (is_yes, ~is_yes))
            estimate = replace(estimate, interval=wilson(estimate.value * pairs, pairs))
        for plainly in before:
            difference, interval = float(now[0] - plainly[0]), _interval(now[1:] - plainly[1:])
            estimate = replace(estimate, difference=difference, difference_interval=interval)
        out[name] = estimate.to_json()
    return out
