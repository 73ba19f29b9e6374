"""MME as a list of pairs of questions, by subtask."""

from __future__ import annotations

from collections.abc import Sequence

from probes.harness.comparison import SampleSet
from probes.image_qa.task import Task
from probes.image_qa.yes_no import RANKING
from probes.mme import file
from probes.mme.samples import SHARES, MmePair, scores, tally, totals


def _parts(samples: Sequence[MmePair]) -> list[SampleSet[MmePair]]:
    return [
        SampleSet(
            "MME", samples, MmePair.chats, tally, scores, SHARES, setting=lambda sample: sample.subtask,
            cluster=lambda sample: sample.picture, each=2, truths=MmePair.truths,
        )
    ]  # fmt: skip


TASK = Task(
    "MME",
    file.load,
    _parts,
    metrics=("acc", "acc_plus", "score", "unread", "auroc", "best_accuracy"),
    share="acc_plus",
    reading="*acc*: the share of questions that are answered rightly. *acc_plus*: the share of images with both "
    "questions answered rightly. *score*: 100 times their sum, 200 at most. *unread*: neither yes nor no, which is wrong. "
    f"{RANKING} "
    "Totals are sums of the subtasks' scores.",
    unit="pairs of questions",
    totals=totals,
)
