"""The readings of See as conditions, and the criterion, written before any run on the paper's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.harness.comparison import BASELINE, SampleSet, Way
from probes.image_qa import pope, yes_no
from probes.image_qa.task import Task
from probes.image_qa.yes_no import YesNo
from steering import Pai, See

ALPHAS = (0.05, 0.1, 0.15, 0.2)
FALL = (0.03, 0.06)
"""The least and the greatest fall from the maximum to twice its alpha: the paper's is 4.7 points, from 0.1 to 0.2."""
PART = "existence"


def _readings(alpha: float) -> dict[str, Way]:
    return {
        "transfer from all": (See(alpha=alpha),),
        "transfer from system": (See(alpha=alpha, source="system"),),
        "scale": (See(alpha=alpha, reading="scale"),),
        "add": (See(alpha=alpha, reading="add"),),
        # PAI's amplification of scores before the softmax, in all layers, without its contrast
        "a + alpha |a|": (Pai(alpha=0.0, beta=0.0, amplify=alpha, first_layer=0),),
    }


READINGS = tuple(_readings(0.1))


def conditions() -> dict[str, Way]:
    """Return every reading with every strength."""
    return {f"{name}, {alpha:g}": way for alpha in ALPHAS for name, way in _readings(alpha).items()}


def judge(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each reading where accuracy is greatest, its change at twice that alpha, and whether it is accepted.

    Readings of which not all strengths were measured are left out. Where several strengths are best, the least counts.
    """
    plain = results[BASELINE][PART]["all"]["accuracy"]["value"]
    verdicts: dict[str, dict[str, Any]] = {}
    for name in READINGS:
        rows = {alpha: results.get(f"{name}, {alpha:g}") for alpha in ALPHAS}
        if any(row is None for row in rows.values()):
            continue
        by_alpha = {alpha: row[PART]["all"]["accuracy"]["value"] for alpha, row in rows.items() if row is not None}
        best = max(by_alpha, key=lambda alpha: (by_alpha[alpha], -alpha))
        fall = by_alpha[best] - by_alpha[2 * best] if 2 * best in by_alpha else None
        accepted = by_alpha[best] > plain and fall is not None and FALL[0] <= round(fall, 9) <= FALL[1]
        verdicts[name] = {
            "without": plain, **{f"{alpha:g}": value for alpha, value in by_alpha.items()},
            "best": best, "fall": fall, "accepted": accepted,
        }  # fmt: skip
    return verdicts


def _parts(samples: Sequence[YesNo]) -> list[SampleSet[Any]]:
    return [yes_no.part(PART, samples)]


TASK = Task(
    "See's readings",
    pope.load,
    _parts,
    metrics=("accuracy", "f1", "yes", "unread", "auroc", "best_accuracy"),
    published=("*pope_random*.json*", "*pope_popular*.json*", "*pope_adversarial*.json*"),
    share="accuracy",
    reading="Accepted is a reading whose accuracy is greatest at alpha 0.05 or 0.1, above that without See, and 3 to 6 "
    f"points lower at twice that (Table 11: 79.8, 86.1, 81.4 at 0, 0.1, 0.2). {yes_no.RANKING}",
    totals=judge,
    conditions=conditions,
)
