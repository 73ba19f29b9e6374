"""TallyQA's files (Acharya et al. 2019), and the scoring of numbers.

A file is a JSON list of `image`, `question`, `answer` and `issimple`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Chat, Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.comparison import SampleSet
from probes.harness.pictures import Source, chat
from probes.image_qa import rows
from probes.image_qa.baselines import Instructed
from probes.image_qa.task import Task

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen",
)  # fmt: skip
"""Words for numbers; TallyQA's answers go to 15."""
DIGITS = 9
"""The most digits of a number: a model that repeats a digit without end is far off, but not an error."""
SHARES = {"accuracy": Share("right", "questions"), "unread": Share("unread", "questions")}


@dataclass(frozen=True)
class Counted:
    """A counting question on an image (or its file); simple: only the kind of object matters."""

    image: Source
    question: str
    answer: int
    simple: bool
    id: str | None = field(default=None, compare=False)

    @property
    def expected(self) -> int:
        """The right answer."""
        return self.answer

    def chats(self) -> list[Chat]:
        """Return the chat of the question; raise ValueError if the image's file does not decode."""
        return [chat([self.image], self.question)]


def number(answer: str) -> int | None:
    """Return the first number of an answer, in figures or in words; "no" and "none" at its beginning are 0."""
    text = answer.lower()
    match = re.search(rf"(?<![\w.])(\d+|{'|'.join(NUMBERS)})(?!\w)", text)
    if match is None:
        return 0 if re.match(r"\W*(no|none)\b", text) else None
    return int(match[1][:DIGITS]) if match[1].isdigit() else NUMBERS.index(match[1])


def tally(sample: Counted, replies: Sequence[Reply]) -> dict[str, float]:
    """Return the answer's contribution to the sums of `scores`; an answer without a number is wrong."""
    (reply,) = replies
    answer = number(reply.text)
    return {
        "questions": 1.0,
        "right": float(answer == sample.answer),
        "unread": float(answer is None),
        "read": float(answer is not None),
        "squares": 0.0 if answer is None else float((answer - sample.answer) ** 2),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return accuracy, the root mean square error of answers with a number, and the share of answers without one."""
    return {
        "accuracy": ratio(sums["right"], sums["questions"]),
        "rmse": np.sqrt(ratio(sums["squares"], sums["read"])),
        "unread": ratio(sums["unread"], sums["questions"]),
    }


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[Counted]:
    """Return the questions of the files.

    Rows that lack something are left out and added to `left_out`. Raises ValueError that names the invalid file and row.
    """
    return rows.of_files(data, partial(_question, folder=images), left_out)


def _question(row: Mapping[str, Any], number: int, folder: Path) -> Counted:
    image, answer = rows.image(folder, rows.text(row, "image")), str(row["answer"]).strip()
    if not answer.isdecimal() or len(answer) > DIGITS:
        raise ValueError(f"its answer must be a whole number; got {row['answer']!r}")
    name = rows.named(image, number)
    return Counted(image, rows.text(row, "question"), int(answer), bool(row["issimple"]), name)


def _image_key(sample: Counted) -> Path | int:
    return sample.image if isinstance(sample.image, Path) else id(sample.image)


def _parts(samples: Sequence[Counted]) -> list[SampleSet[Counted]]:
    return [
        SampleSet(
            "TallyQA", samples, Counted.chats, tally, scores, SHARES,
            setting=lambda sample: "simple" if sample.simple else "complex", cluster=_image_key,
        )
    ]  # fmt: skip


TASK = Task(
    "TallyQA",
    load,
    _parts,
    metrics=("accuracy", "rmse", "unread"),
    published=("test.json",),
    share="accuracy",
    reading="*rmse*: root mean square error of the answers that hold a number. *unread*: those that hold none, which are "
    "wrong.",
    instructed=Instructed("Rely on the image content, and count what it shows."),
)
