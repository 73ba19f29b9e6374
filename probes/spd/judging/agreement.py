"""The agreement of judges with people's labels, and with each other: Cohen's kappa."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from probes.harness.bootstrap import interval
from probes.image_pairs.coco import CATEGORIES
from probes.spd.judging.cases import CLAIMS, PAIRED
from probes.spd.judging.rules import Statement, ruled
from probes.spd.samples import PicturePair
from probes.spd.scoring import Verdict

BY_HAND, BY_RULES, BY_MODEL = "by hand", "by rules", "by the judge"
NONE = "none"
"""The label where a judge finds no claim."""

Found = Sequence[str | None]
"""Labels of the cases; None where there is no judgement."""

Judged = Callable[[Sequence[Statement]], Sequence[Verdict]]


def agreement(judge: Judged | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return the agreement of all pairs of raters on claims and on pairs of claims.

    A row names both raters, with the number of cases that both judged, the share of equal labels, kappa and its interval.
    """
    raters: dict[str, Judged] = {
        BY_RULES: lambda statements: [ruled(statement, CATEGORIES) for statement in statements]
    }
    if judge is not None:
        raters[BY_MODEL] = judge
    claims: dict[str, Found] = {BY_HAND: [finding for *_, finding in CLAIMS]} | {
        name: found_by(rater) for name, rater in raters.items()
    }
    paired: dict[str, Found] = {BY_HAND: [label for *_, label in PAIRED]} | {
        name: compared_by(rater) for name, rater in raters.items()
    }
    return {"claims": _rows(claims), "pairs of claims": _rows(paired)}


def found_by(judge: Judged) -> list[str | None]:
    """Return a judge's finding on each of `CLAIMS`."""
    statements = [Statement(PicturePair(str(i), (true,)), "", "", text) for i, (true, text, _) in enumerate(CLAIMS)]
    return [_finding(verdict) for verdict in judge(statements)]


def compared_by(judge: Judged) -> list[str | None]:
    """Return a judge's label for each of `PAIRED`, without telling it the truth."""
    statements = [
        Statement(PicturePair(str(i), ()), same, different, "") for i, (same, different, _) in enumerate(PAIRED)
    ]
    return [None if verdict.labels is None else (verdict.labels or (NONE,))[0] for verdict in judge(statements)]


def _finding(verdict: Verdict) -> str | None:
    faithfulness = verdict.faithfulness
    if faithfulness is None:
        return None
    return next(iter(faithfulness.errors), "faithful") if faithfulness.claims else NONE


def _rows(labels: Mapping[str, Found]) -> list[dict[str, Any]]:
    rows = []
    for first, second in combinations(labels, 2):
        labelled = [
            (a, b) for a, b in zip(labels[first], labels[second], strict=True) if a is not None and b is not None
        ]
        rows.append(
            {
                "first": first,
                "second": second,
                "n": len(labelled),
                **kappa([a for a, _ in labelled], [b for _, b in labelled]),
            }
        )
    return rows


def kappa(first: Sequence[str], second: Sequence[str]) -> dict[str, Any]:
    """Return the share of equal labels of two raters, and Cohen's kappa with its 95 % bootstrap interval over cases.

    Kappa is None if chance alone would agree on everything, and all of it is None without cases.
    """
    if not first:
        return {"agreed": None, "kappa": None, "kappa_95": None}
    names = sorted({*first, *second})
    codes = np.array([names.index(a) * len(names) + names.index(b) for a, b in zip(first, second, strict=True)])

    def statistic(values: np.ndarray, axis: int = -1) -> np.ndarray:
        counted = np.stack([(values == code).mean(axis) for code in range(len(names) ** 2)], -1)
        joint = counted.reshape(*counted.shape[:-1], len(names), len(names))
        agreed = np.trace(joint, axis1=-2, axis2=-1)
        chance = (joint.sum(-1) * joint.sum(-2)).sum(-1)
        return np.asarray((agreed - chance) / np.where(chance < 1, 1 - chance, np.nan))

    value = float(statistic(codes))
    agreed = float(np.mean([a == b for a, b in zip(first, second, strict=True)]))
    if math.isnan(value):
        return {"agreed": agreed, "kappa": None, "kappa_95": None}
    return {"agreed": agreed, "kappa": value, "kappa_95": list(interval(codes, statistic=statistic))}
