"""VSR's files (Liu et al. 2023): a JSON object a line with `image`, `caption`, `label` (1: true) and `relation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from probes.harness.comparison import SampleSet
from probes.lists import rows, yes_no
from probes.lists.task import Task
from probes.lists.yes_no import YesNo

QUESTION = 'Is this statement true of the picture? "{caption}" Answer yes or no.'
"""Our wording; the files hold statements alone."""


def load(data: Sequence[Path], images: Path, left: list[str] | None = None) -> list[YesNo]:
    """The statements as questions; raises ValueError that names the file and row that is wrong; `left` says which
    are left out because something of them is missing."""
    return list(
        chain.from_iterable(rows.made(file, rows.read(file), partial(_question, folder=images), left) for file in data)
    )


def _question(row: Mapping[str, Any], number: int, folder: Path) -> YesNo:
    image = rows.image(folder, rows.text(row, "image"))
    text = QUESTION.format(caption=rows.text(row, "caption"))
    return YesNo(image, text, rows.told(row["label"]), str(row["relation"]), id=rows.named(image, number))


def _parts(samples: Sequence[YesNo]) -> list[SampleSet[YesNo]]:
    return [yes_no.part("VSR", samples)]


TASK = Task(
    "VSR",
    load,
    _parts,
    metrics=("accuracy", "f1", "yes", "unread"),
    published=("test.jsonl", "zeroshot/test.jsonl"),
    share="accuracy",
    reading="By relation. *yes*: the share of statements called true. *unread*: neither yes nor no, which is wrong.",
    unit="statements",
)
