"""POPE as a list of questions: its files, with the common scoring of yes and no, by setting."""

from __future__ import annotations

from collections.abc import Sequence

from probes.harness.comparison import SampleSet
from probes.image_qa import pope, yes_no
from probes.image_qa.task import Task
from probes.image_qa.yes_no import YesNo


def _parts(samples: Sequence[YesNo]) -> list[SampleSet[YesNo]]:
    return [yes_no.part("existence", samples)]


TASK = Task(
    "POPE",
    pope.load,
    _parts,
    metrics=("accuracy", "precision", "recall", "f1", "yes", "unread", "auroc", "best_accuracy"),
    published=("*pope_random*.json*", "*pope_popular*.json*", "*pope_adversarial*.json*"),
    share="accuracy",
    reading="*yes*: the share of questions answered so, of which half should be. *precision*, *recall*, *f1*: of yes. "
    f"*unread*: neither yes nor no, which is wrong. {yes_no.RANKING}",
)
