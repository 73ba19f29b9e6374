"""The metrics of SPD-Faith Bench (appendix B.2, and the authors' eval/) on claims read from answers elsewhere.

Every metric is a quotient of sums over pairs of pictures: `tally` returns a pair's contribution, `scores` computes the
metrics from the sums, so that resampled pairs need no second look. The paper and its code leave some of them open; each
definition in doubt has its own name:

- dqr_exact: share of the pairs whose number of differences is claimed exactly (equation 8). ds_tolerance:
  max(0, 1 - |claimed - true| / true) (equation 9). By these DQR never exceeds DS, which it does in the paper's tables.
- dqr_ratio: claimed / true, not clipped (the released code's number for DQR). ds_detect: share of the differing pairs with
  any difference claimed (section 3.2). false_alarms: the same share of the pairs that do not differ.
- tf1: micro F1 over `TYPES`, by type the smaller of the claimed and the true count; other types do not count (released
  code, equation 10). PRECISION and RECALL also by type.
- cf1: the same by category (equation 11). cf1_released: each claimed category that occurs in the truth counts, however
  often it is claimed, so that recall may exceed 1 (released code).
- cr: mean over the claims that the answers to "same?" and "different?" share, then over pairs (equations 12 and 13); a pair
  has none if either answer claims nothing specific. cr_pairs: share of the pairs that have one. cr_all: the mean over all
  pairs, one that has none counting 0, so that ways of answering are compared on the same pairs.
- cr_clauses: every claim of one answer with every claim of the other (appendix B.2 as printed), where claims about different
  things are ambiguous; over the same pairs as cr.
- yes_no_consistency: the same weights for the two yes/no answers, which cr leaves out: unlike +1, alike -1, one of them
  neither yes nor no +0.5. contradictions: share of the pairs answered "yes" twice (section 3.2). yes_same: share of "yes"
  to "same?" (figure 11).

dqr_ratio, ds_tolerance and ds_detect are means over the pairs that differ, as all of the benchmark's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

from probes.harness.bootstrap import Share, ratio

TYPES = ("color", "remove", "position")
"""The types of difference in the benchmark."""

SHARES = {
    "dqr_exact": Share("exact", "pairs"),
    "ds_detect": Share("detected", "differing"),
    "false_alarms": Share("alarmed", "alike"),
    "cr_pairs": Share("compared", "pairs"),
    "contradictions": Share("contradictions", "pairs"),
    "yes_same": Share("yes_same", "pairs"),
}
"""Metrics that are shares of pairs, or of claims."""
for _kind in (*TYPES, "category"):
    SHARES[f"{_kind}_precision"] = Share(f"{_kind}_matched", f"{_kind}_claimed", fixed=False)
    SHARES[f"{_kind}_recall"] = Share(f"{_kind}_matched", f"{_kind}_true", fixed=False)

Label = Literal["consistent", "contradictory", "ambiguous"]
WEIGHTS: dict[Label, float] = {"consistent": 1.0, "contradictory": -1.0, "ambiguous": 0.5}
"""The weights of equation 13."""


@dataclass(frozen=True)
class Claim:
    """A difference, as it is or as an answer describes it.

    It has a type (one of `TYPES`, or another), the category of the changed object, and its attribute (the new colour, the
    new place, the place it is gone from); each is None if not stated. `sure` is False if the answer hedges.
    """

    type: str | None
    category: str | None = None
    attribute: str | None = None
    sure: bool = True


@dataclass(frozen=True)
class PairScores:
    """A pair of pictures with its true and claimed differences.

    `count` is the number that the answer states (None: the number that it describes). `same` and `different`: its yes/no
    answers, None for neither. `labels`: those of the claims of these two answers, see `compare`; `crossed`: those of all
    their pairs, see `cross`.
    """

    true: Sequence[Claim]
    claimed: Sequence[Claim]
    count: int | None = None
    same: bool | None = None
    different: bool | None = None
    labels: Sequence[Label] = ()
    crossed: Sequence[Label] = ()


def cross(first: Sequence[Claim], second: Sequence[Claim]) -> list[Label]:
    """Return a label for each claim of one answer with each of the other; none if either answer claims nothing."""
    return [
        label if label is not None and claim.sure and other.sure else "ambiguous"
        for claim in first
        for other in second
        for label in (_label(claim, other),)
    ]


def compare(first: Sequence[Claim], second: Sequence[Claim]) -> list[Label]:
    """Return how the specific claims of two answers agree.

    There is one label per matching pair of claims and one, ambiguous, per claim without a counterpart; none if either answer
    claims nothing. Two claims match if they are of one category and of one type, or if one of them says that the object is
    gone or new (it cannot also have changed). They are consistent if type and attribute agree (an unstated attribute agrees
    with any), otherwise contradictory; ambiguous if either is unsure, or has no category.
    """
    if not first or not second:
        return []
    labels: list[Label] = []
    # Sorted, so that the labels do not depend on the order in which claims are made.
    left, right = (sorted(claims, key=lambda claim: tuple(map(str, astuple(claim)))) for claims in (first, second))
    stages: tuple[tuple[Label, bool], ...] = (
        ("consistent", True), ("consistent", False), ("contradictory", False), ("ambiguous", False),
    )  # fmt: skip
    for label, same in stages:
        for claim in tuple(left):
            match = next((o for o in right if _label(claim, o) == label and (o == claim or not same)), None)
            if match is not None:
                left.remove(claim)
                right.remove(match)
                labels.append("ambiguous" if not (claim.sure and match.sure) else label)
    return labels + ["ambiguous"] * (len(left) + len(right))


def _label(first: Claim, second: Claim) -> Label | None:
    """Return how two claims agree; None if they are about different things."""
    if first.type is None or second.type is None or first.category is None or second.category is None:
        alike = (first.type or second.type) == (second.type or first.type)
        same_category = (first.category or second.category) == (second.category or first.category)
        return "ambiguous" if alike and same_category else None
    if first.category != second.category:
        return None
    if first.type != second.type:
        return "contradictory" if {first.type, second.type} & {"remove", "add"} else None
    attributes_known = first.attribute is not None and second.attribute is not None
    return "contradictory" if attributes_known and first.attribute != second.attribute else "consistent"


def tally(pair: PairScores) -> dict[str, float]:
    """Return a pair's contribution to the sums from which `scores` computes metrics."""
    claimed = len(pair.claimed) if pair.count is None else pair.count
    true = len(pair.true)
    answers = (pair.same, pair.different)
    judged: Label = "ambiguous" if None in answers else "consistent" if pair.same != pair.different else "contradictory"
    sums = {
        "pairs": 1.0,
        "exact": claimed == true,
        "differing": true > 0,
        "tolerance": max(0.0, 1 - abs(claimed - true) / true) if true else 0.0,
        "ratio": claimed / true if true else 0.0,
        "detected": claimed > 0 and true > 0,
        "alike": true == 0,
        "alarmed": claimed > 0 and true == 0,
        "yes_no": WEIGHTS[judged],
        "contradictions": answers == (True, True),
        "yes_same": pair.same is True,
        "compared": bool(pair.labels),
        "cr": _mean_weight(pair.labels),
        "crossed": bool(pair.crossed),
        "cr_clauses": _mean_weight(pair.crossed),
    }
    for kind in TYPES:
        sums |= _matches(
            kind, *([claim.type for claim in side if claim.type == kind] for side in (pair.claimed, pair.true))
        )
    categories = [[claim.category for claim in side if claim.category] for side in (pair.claimed, pair.true)]
    sums |= _matches("category", *categories)
    sums["category_occurring"] = sum(name in categories[1] for name in categories[0])
    return {name: float(value) for name, value in sums.items()}


def _mean_weight(labels: Sequence[Label]) -> float:
    return sum(WEIGHTS[label] for label in labels) / max(len(labels), 1)


def _matches(name: str, claimed: Sequence[str | None], true: Sequence[str | None]) -> dict[str, float]:
    matched = sum((Counter(claimed) & Counter(true)).values())
    return {f"{name}_claimed": len(claimed), f"{name}_true": len(true), f"{name}_matched": matched}


def scores(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the metrics of summed tallies, each of the shape of a sum; NaN if there was nothing to measure."""
    types = {part: np.sum([sums[f"{kind}_{part}"] for kind in TYPES], 0) for part in ("claimed", "true", "matched")}
    results = {
        "dqr_exact": ratio(sums["exact"], sums["pairs"]),
        "ds_tolerance": ratio(sums["tolerance"], sums["differing"]),
        "dqr_ratio": ratio(sums["ratio"], sums["differing"]),
        "ds_detect": ratio(sums["detected"], sums["differing"]),
        "false_alarms": ratio(sums["alarmed"], sums["alike"]),
        "tf1": ratio(2 * types["matched"], types["claimed"] + types["true"]),
        "cf1": ratio(2 * sums["category_matched"], sums["category_claimed"] + sums["category_true"]),
        "cf1_released": ratio(2 * sums["category_occurring"], sums["category_claimed"] + sums["category_true"]),
        "cr": ratio(sums["cr"], sums["compared"]),
        "cr_all": ratio(sums["cr"], sums["pairs"]),
        "cr_clauses": ratio(sums["cr_clauses"], sums["crossed"]),
        "cr_pairs": ratio(sums["compared"], sums["pairs"]),
        "yes_no_consistency": ratio(sums["yes_no"], sums["pairs"]),
        "contradictions": ratio(sums["contradictions"], sums["pairs"]),
        "yes_same": ratio(sums["yes_same"], sums["pairs"]),
    }
    for kind in (*TYPES, "category"):
        results[f"{kind}_precision"] = ratio(sums[f"{kind}_matched"], sums[f"{kind}_claimed"])
        results[f"{kind}_recall"] = ratio(sums[f"{kind}_matched"], sums[f"{kind}_true"])
    return results


def score(pairs: Iterable[PairScores]) -> dict[str, float | None]:
    """Return the metrics of some pairs; None if there was nothing to measure."""
    tallies = [tally(pair) for pair in pairs]
    sums = {
        name: np.array(sum(tally[name] for tally in tallies))
        for name in (tallies[0] if tallies else tally(PairScores((), ())))
    }
    return {name: None if np.isnan(value) else float(value) for name, value in scores(sums).items()}
