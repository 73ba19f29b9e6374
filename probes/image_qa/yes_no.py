"""Questions with the answer yes or no, and the scores of answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from probes.answering.base import Chat, Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.comparison import SampleSet
from probes.harness.pictures import Source, chat
from probes.image_pairs.claims import yes

SHARES = {
    "accuracy": Share("right", "questions"),
    "precision": Share("hits", "yes", fixed=False),
    "recall": Share("hits", "present"),
    "yes": Share("yes", "questions"),
    "unread": Share("unread", "questions"),
}


RANKING = (
    "*auroc*: how often a question to be answered yes has greater log-odds of yes at the first token than one to be "
    "answered no; *best_accuracy*: the accuracy with the threshold between them that makes it greatest. Neither changes if "
    "an intervention makes the model say yes more often to all questions alike."
)
"""An explanation of the metrics of `probes.harness.bootstrap`."""


@dataclass(frozen=True)
class YesNo:
    """A question on an image (or its file).

    present: True if yes is right. setting: the group in which it is scored. id: its name, if it comes from a file.
    """

    image: Source
    question: str
    present: bool
    setting: str
    id: str | None = field(default=None, compare=False, kw_only=True)

    @property
    def expected(self) -> str:
        """The right answer."""
        return "yes" if self.present else "no"

    def chats(self) -> list[Chat]:
        """Return the chat of the question; raise ValueError if the image's file does not decode."""
        return [chat([self.image], self.question)]


def shown(sample: YesNo) -> Path | int:
    """Return a key that distinguishes a question's picture from others."""
    return sample.image if isinstance(sample.image, Path) else id(sample.image)


def tally(sample: YesNo, replies: Sequence[Reply]) -> dict[str, float]:
    """Return the answer's contribution to the sums of `scores`; neither yes nor no is wrong, and counts as no."""
    (reply,) = replies
    answer = yes(reply.text)
    return {
        "questions": 1.0,
        "right": float(answer is sample.present),
        "yes": float(answer is True),
        "present": float(sample.present),
        "hits": float(answer is True and sample.present),
        "unread": float(answer is None),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return accuracy, precision, recall and F1 of "yes", and the shares of "yes" and of answers that are neither."""
    return {
        "accuracy": ratio(sums["right"], sums["questions"]),
        "precision": ratio(sums["hits"], sums["yes"]),
        "recall": ratio(sums["hits"], sums["present"]),
        "f1": ratio(2 * sums["hits"], sums["yes"] + sums["present"]),
        "yes": ratio(sums["yes"], sums["questions"]),
        "unread": ratio(sums["unread"], sums["questions"]),
    }


def truths(sample: YesNo) -> list[bool]:
    """Return whether yes is right, of the sample's one question."""
    return [sample.present]


def part(name: str, samples: Sequence[YesNo]) -> SampleSet[YesNo]:
    """Return such questions as a comparison asks them, scored by setting."""
    return SampleSet(
        name, samples, YesNo.chats, tally, scores, SHARES, setting=lambda sample: sample.setting, cluster=shown,
        truths=truths,
    )  # fmt: skip
