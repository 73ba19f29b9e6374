"""The order in which a score puts yes/no questions, which a shift of the threshold between yes and no leaves as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from probes.harness.bootstrap import RESAMPLES, Estimate, areas, bounds, number_clusters

Statistic = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def best_accuracies(times: np.ndarray, values: np.ndarray, is_yes: np.ndarray) -> np.ndarray:
    """Return the accuracy at the threshold that gives the greatest one, of each resample: (resamples,).

    times: (resamples, samples), how often a sample occurs in a resample. Values from the threshold on are answered yes. The
    threshold is chosen on the same samples, so the accuracy is an upper bound of one that is set beforehand.
    """
    order = np.argsort(values, kind="stable")
    weights, wanted = times[:, order], is_yes[order]
    # Right answers with the threshold behind the first k samples: the no among these and the yes among the others.
    right = np.cumsum(np.where(wanted, -weights, weights), axis=1)
    right = np.concatenate([np.zeros((len(times), 1)), right], 1) + (weights * wanted).sum(1, keepdims=True)
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
    together.
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
        for plainly in before:
            difference, interval = float(now[0] - plainly[0]), _interval(now[1:] - plainly[1:])
            estimate = replace(estimate, difference=difference, difference_interval=interval)
        out[name] = estimate.to_json()
    return out


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    defined = values[~np.isnan(values)]
    return bounds(defined) if len(defined) else None
