"""VSR's files (Liu et al. 2023): one JSON object per line with `image`, `caption`, `label` (1: true) and `relation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from probes.harness.comparison import SampleSet
from probes.image_qa import rows, yes_no
from probes.image_qa.baselines import Instructed
from probes.image_qa.task import Task
from probes.image_qa.yes_no import YesNo

QUESTION = 'Is this statement true of the picture? "{caption}" Answer yes or no.'
"""The question's wording, which is ours; the files hold only statements."""


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[YesNo]:
    """Return the statements as questions.

    Rows that lack something are left out and added to `left_out`. Raises ValueError that names the invalid file and row.
    """
    return rows.of_files(data, partial(_question, folder=images), left_out)


def _question(row: Mapping[str, Any], number: int, folder: Path) -> YesNo:
    image = rows.image(folder, rows.text(row, "image"))
    text = QUESTION.format(caption=rows.text(row, "caption"))
    return YesNo(image, text, rows.yes_or_no(row["label"]), str(row["relation"]), id=rows.named(image, number))


def _parts(samples: Sequence[YesNo]) -> list[SampleSet[YesNo]]:
    return [yes_no.part("VSR", samples)]


TASK = Task(
    "VSR",
    load,
    _parts,
    metrics=("accuracy", "f1", "yes", "unread", "auroc", "best_accuracy"),
    published=("test.jsonl", "zeroshot/test.jsonl"),
    share="accuracy",
    reading="By relation. *yes*: the share of statements called true. *unread*: neither yes nor no, which is wrong. "
    f"{yes_no.RANKING}",
    unit="statements",
    instructed=Instructed("Rely on the image content."),
)
