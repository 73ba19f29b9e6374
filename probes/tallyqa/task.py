"""TallyQA's files (Acharya et al. 2019): a JSON list of `image`, `question`, `answer` and `issimple`; and how numbers are
scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Chat, Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.comparison import SampleSet
from probes.harness.pictures import Source, chat
from probes.lists import rows
from probes.lists.task import Task

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen",
)  # fmt: skip
"""TallyQA's answers go to 15."""
DIGITS = 9
"""Of a number at most: a model that repeats a figure without end is wrong by much, and no error."""
SHARES = {"accuracy": Share("right", "questions"), "unread": Share("unread", "questions")}


@dataclass(frozen=True)
class Counted:
    """How many of something are in an image (or its file). simple: nothing but its kind is asked of it."""

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
        """The question; raises ValueError where the image's file does not decode."""
        return [chat([self.image], self.question)]


def number(answer: str) -> int | None:
    """The first number of an answer, in figures or in words; "no" and "none" at its beginning are 0."""
    said = answer.lower()
    found = re.search(rf"(?<![\w.])(\d+|{'|'.join(NUMBERS)})(?!\w)", said)
    if found is None:
        return 0 if re.match(r"\W*(no|none)\b", said) else None
    return int(found[1][:DIGITS]) if found[1].isdigit() else NUMBERS.index(found[1])


def tally(sample: Counted, replies: Sequence[Reply]) -> dict[str, float]:
    """What the one answer adds to the sums that `scores` takes; an answer without a number is wrong."""
    (reply,) = replies
    said = number(reply.text)
    return {
        "questions": 1.0,
        "right": float(said == sample.answer),
        "unread": float(said is None),
        "read": float(said is not None),
        "squares": 0.0 if said is None else float((said - sample.answer) ** 2),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Accuracy, the root mean square error of the answers that hold a number, and the share of those that hold none."""
    return {
        "accuracy": ratio(sums["right"], sums["questions"]),
        "rmse": np.sqrt(ratio(sums["squares"], sums["read"])),
        "unread": ratio(sums["unread"], sums["questions"]),
    }


def load(data: Sequence[Path], images: Path, left: list[str] | None = None) -> list[Counted]:
    """The questions; raises ValueError that names the file and row that is wrong; `left` says which are left out
    because something of them is missing."""
    return list(
        chain.from_iterable(rows.made(file, rows.read(file), partial(_question, folder=images), left) for file in data)
    )


def _question(row: Mapping[str, Any], number: int, folder: Path) -> Counted:
    image, answer = rows.image(folder, rows.text(row, "image")), str(row["answer"]).strip()
    if not answer.isdecimal() or len(answer) > DIGITS:
        raise ValueError(f"its answer must be a whole number; got {row['answer']!r}")
    name = rows.named(image, number)
    return Counted(image, rows.text(row, "question"), int(answer), bool(row["issimple"]), name)


def _shown(sample: Counted) -> Path | int:
    return sample.image if isinstance(sample.image, Path) else id(sample.image)


def _parts(samples: Sequence[Counted]) -> list[SampleSet[Counted]]:
    return [
        SampleSet(
            "TallyQA", samples, Counted.chats, tally, scores, SHARES,
            setting=lambda sample: "simple" if sample.simple else "complex", cluster=_shown,
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
)
