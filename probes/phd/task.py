"""PhD's file, and PhD as a list of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from probes.image_qa import rows
from probes.image_qa.baselines import Instructed
from probes.image_qa.task import Task
from probes.image_qa.yes_no import RANKING
from probes.phd.samples import MODES, Mode, PhdSample, parts

FOLLOW = "In case there is an inconsistency between the context and the image content, you should follow the image."
"""The sentence that PhD's authors put between a text and the question: an instruction, no part of plain asking."""


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[PhdSample]:
    """Return the questions of PhD's data.json: each row's two questions plainly and beside its two texts.

    Rows of pictures that go against common sense (ccs) have no texts and are asked plainly. Rows that lack something are
    left out and added to `left_out`. Raises ValueError that names the invalid file and row.
    """
    return list(chain.from_iterable(rows.of_files(data, partial(_questions, folder=images), left_out)))


def _questions(row: Mapping[str, Any], place: int, folder: Path) -> list[PhdSample]:
    number, task = str(row["image_id"]), str(row["task"])
    unusual = "ccs_description" in row
    image = rows.image(folder, f"CCS_images/{number}.png") if unusual else rows.coco(folder, number)
    name = rows.named(image, place)
    modes: tuple[Mode, ...] = ("base",) if unusual else MODES
    return [
        PhdSample(image, _text(row, mode, rows.text(row, f"{answer}_question")), answer == "yes", task, mode, id=name)
        for mode in modes
        for answer in ("yes", "no")
    ]


def _text(row: Mapping[str, Any], mode: Mode, question: str) -> str:
    return question if mode == "base" else f"{row['context'][mode]}\n{question}"


TASK = Task(
    "PhD",
    load,
    parts,
    metrics=("accuracy", "recall", "recall_no", "index", "yes", "unread", "auroc", "best_accuracy"),
    published=("data.json",),
    share="accuracy",
    reading="Each question is asked plainly (base), beside an inaccurate text (iac) and beside an incorrect one (icc). "
    "*recall*, *recall_no*: the shares of yes and of no that are answered so; *index*: their harmonic mean, the PhD index. "
    f"*yes*: the share answered so. *unread*: neither yes nor no, which is wrong. {RANKING}",
    instructed=Instructed(FOLLOW),
)
