"""The faithfulness of a description of differences, each claim compared with the truth.

Source: SPD-Faith Bench, equations 14 and 15, and the error categories of its appendix B.2.

A true difference matches at most one claim. A claim is faithful if type and category agree, and the attribute where both
state one. The others are, in this order: an attribute error (type and category agree), a type confusion (the category
agrees), a type-category mismatch (the type agrees), a fabrication. The sixth category, the quantity error, is of the answer:
it claims another number of differences than there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from probes.image_pairs.metrics import Claim

Finding = Literal["faithful", "attribute_error", "type_confusion", "type_category_mismatch", "fabrication"]
FINDINGS: tuple[Finding, ...] = get_args(Finding)
ERRORS = FINDINGS[1:]
"""The errors of a claim."""


@dataclass(frozen=True)
class Faithfulness:
    """The number of faithful claims in an answer, and of wrong ones by error."""

    faithful: int
    errors: Mapping[str, int]
    quantity_error: bool

    @property
    def claims(self) -> int:
        return self.faithful + sum(self.errors.values())

    @classmethod
    def of(cls, results: Iterable[Finding], true: int) -> Faithfulness:
        """Count the findings on each claim, of `true` differences in all."""
        counts = Counter(results)
        return cls(counts["faithful"], {name: counts[name] for name in ERRORS if counts[name]}, counts.total() != true)


def findings(claimed: Sequence[Claim], true: Sequence[Claim]) -> list[Finding]:
    """Return the finding on each claim, in the order of the claims."""
    unmatched = list(true)
    findings_by_claim: dict[int, Finding] = {}
    for finding, agree in _STAGES:
        for number, claim in enumerate(claimed):
            match = (
                None
                if number in findings_by_claim
                else next((true_claim for true_claim in unmatched if agree(claim, true_claim)), None)
            )
            if match is not None:
                unmatched.remove(match)
                findings_by_claim[number] = finding
    return [findings_by_claim.get(number, "fabrication") for number in range(len(claimed))]


def _attribute(claim: Claim, other: Claim) -> bool:
    return None in (claim.attribute, other.attribute) or claim.attribute == other.attribute


def _category(claim: Claim, other: Claim) -> bool:
    return claim.category is not None and claim.category == other.category


def _type(claim: Claim, other: Claim) -> bool:
    return claim.type is not None and claim.type == other.type


_STAGES: tuple[tuple[Finding, Callable[[Claim, Claim], bool]], ...] = (
    ("faithful", lambda claim, other: _type(claim, other) and _category(claim, other) and _attribute(claim, other)),
    ("attribute_error", lambda claim, other: _type(claim, other) and _category(claim, other)),
    ("type_confusion", _category),
    ("type_category_mismatch", _type),
)
