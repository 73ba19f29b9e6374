"""The effect of SAGE's stages on faithfulness: scoring of answers to existence questions and about pairs of pictures.

For differences these are the metrics of `differences` on what `claims` reads from the answers. Every condition answers the
same samples, so each is compared with the plain answers sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.answering.base import Answerer, Reply
from probes.harness.comparison import SampleSet, Way, compare
from probes.image_pairs import metrics
from probes.image_pairs.claims import claims, yes
from probes.image_pairs.metrics import SHARES, PairScores
from probes.image_qa.yes_no import YesNo, part
from probes.sage.samples import QUESTIONS, Difference

MAX_TOKENS = 40


def evaluate(
    answerer: Answerer,
    conditions: Mapping[str, Way],
    existence: Sequence[YesNo],
    differences: Sequence[Difference],
    categories: Sequence[str],
    quiet: bool = False,
) -> dict[str, Any]:
    """Return the metrics of "existence" and "differences" by condition, as `compare` returns them.

    `categories` are the names of the objects that a claim may be about.
    """

    def tally(sample: Difference, replies: Sequence[Reply]) -> dict[str, float]:
        return metrics.tally(pair_of(sample, [reply.text for reply in replies], categories))

    existence_part = part("existence", existence)
    pairs = SampleSet(
        "differences", differences, Difference.chats, tally, metrics.scores, SHARES,
        setting=lambda sample: sample.setting, each=len(QUESTIONS),
    )  # fmt: skip
    return compare(answerer, conditions, [existence_part, pairs], max_tokens=MAX_TOKENS, quiet=quiet)


def pair_of(sample: Difference, answers: Sequence[str], categories: Sequence[str]) -> PairScores:
    """Return a sample with its answers to `QUESTIONS` as the metrics take it."""
    difference, same, different, *explained = answers
    specific = [claims(answer, categories) for answer in explained]
    return PairScores(
        true=sample.true,
        claimed=claims(difference, categories),
        same=yes(same),
        different=yes(different),
        labels=metrics.compare(*specific),
        crossed=metrics.cross(*specific),
    )
