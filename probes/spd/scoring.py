"""The contributions of answers about a pair to the sums behind the metrics.

They are those of `differences.metrics`, and:

- of the single-difference set: right, the share of the pairs whose two yes/no answers are both right; unread, the share
  with either neither yes nor no.
- of several differences: drf, the mean over pairs of the share of faithful claims (equation 15, as the released code takes
  it), and drf_claims, the share of all claims; drf_pairs, the share of the pairs that have a claim. By error category its
  share of the claims, and of pairs the quantity_error. counted: the share of the pairs whose number the model stated. Where
  it stated none, as many count as it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probes.harness.bootstrap import Share, Tallies, ratio
from probes.image_pairs import metrics
from probes.image_pairs.claims import counted, read, yes
from probes.image_pairs.faithfulness import ERRORS, Faithfulness
from probes.image_pairs.metrics import PairScores
from probes.spd.samples import PicturePair

_OF_SINGLE = ("pairs", "contradictions", "yes_same", "yes_no")
SINGLE_SHARES = {
    "contradictions": metrics.SHARES["contradictions"],
    "yes_same": metrics.SHARES["yes_same"],
    "right": Share("right", "pairs"),
    "unread": Share("unread", "pairs"),
}
SEVERAL_SHARES: dict[str, Share] = {
    **metrics.SHARES,
    "drf_claims": Share("faithful", "found", fixed=False),
    "drf_pairs": Share("describing", "pairs"),
    "quantity_error": Share("quantity_error", "describing", fixed=False),
    "counted": Share("stated", "pairs"),
    **{name: Share(name, "found", fixed=False) for name in ERRORS},
}


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on a pair's answers.

    It covers the claims that the answers to "same?" and "different?" share, and those of the description; each is None
    without a judgement. crossed: the labels of all pairs of the former claims, by rules alone.
    """

    labels: Sequence[metrics.Label] | None
    faithfulness: Faithfulness | None
    crossed: Sequence[metrics.Label] = ()


def single_tally(pair: PicturePair, answers: Sequence[str]) -> dict[str, float]:
    """Return the contribution of the answers to "same?" and "different?"."""
    same, different = map(yes, answers)
    sums = metrics.tally(PairScores(pair.true, (), same=same, different=different))
    return {name: sums[name] for name in _OF_SINGLE} | {
        "right": float(same is False and different is True),
        "unread": float(None in (same, different)),
    }


def single_scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the metrics of the single set from its sums."""
    scores = {name: ratio(sums[share.counted], sums[share.of]) for name, share in SINGLE_SHARES.items()}
    return scores | {"yes_no_consistency": ratio(sums["yes_no"], sums["pairs"])}


def several_tally(
    pair: PicturePair, answers: Sequence[str], verdict: Verdict, categories: Sequence[str]
) -> dict[str, float]:
    """Return the contribution of the answers to `asking.SEVERAL` and `asking.FIND`."""
    number, differences_text, same, different, _, _, _ = answers
    scored = PairScores(
        true=pair.true,
        claimed=read(differences_text, categories),
        count=counted(number),
        same=yes(same),
        different=yes(different),
        labels=verdict.labels or (),
        crossed=verdict.crossed,
    )
    faithful = verdict.faithfulness or Faithfulness(0, {}, False)
    claims = faithful.claims
    reasoning: dict[str, float] = {
        "found": claims,
        "faithful": faithful.faithful,
        "drf": faithful.faithful / max(claims, 1),
        "describing": claims > 0,
        "quantity_error": claims > 0 and faithful.quantity_error,
        "stated": scored.count is not None,
        **{name: faithful.errors.get(name, 0) for name in ERRORS},
    }
    return metrics.tally(scored) | {name: float(value) for name, value in reasoning.items()}


def several_scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the metrics of the set with several differences from its sums."""
    own_shares = SEVERAL_SHARES.keys() - metrics.SHARES.keys()
    scores = {
        name: ratio(sums[SEVERAL_SHARES[name].counted], sums[SEVERAL_SHARES[name].of]) for name in sorted(own_shares)
    }
    return {**metrics.scores(sums), "drf": ratio(sums["drf"], sums["describing"]), **scores}
