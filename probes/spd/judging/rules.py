"""The judge without a model, which reads claims from answers by rules, and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probes.image_pairs.claims import read
from probes.image_pairs.faithfulness import Faithfulness, findings
from probes.image_pairs.metrics import compare, cross
from probes.spd.samples import PicturePair
from probes.spd.scoring import Verdict


@dataclass(frozen=True)
class Statement:
    """The input of a judge.

    It holds a pair, the explained answers to "same?" and "different?", and the description of as many differences as the
    model counted (empty if it counted none).
    """

    pair: PicturePair
    same: str
    different: str
    found: str


def ruled(statement: Statement, categories: Sequence[str]) -> Verdict:
    """Return the verdict by rules; `categories` are the names of the objects that a claim may be about."""
    same, different = (read(text, categories) for text in (statement.same, statement.different))
    true = statement.pair.true
    findings_of_claims = findings(read(statement.found, categories), true)
    return Verdict(compare(same, different), Faithfulness.of(findings_of_claims, len(true)), cross(same, different))
