"""MME's questions and their scores (Fu et al. 2023, section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Chat, Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.pictures import Source, chat
from probes.image_pairs.claims import yes

COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
"""The subtasks of cognition; all others are of perception."""

SHARES = {
    "acc": Share("right", "questions", fixed=False),
    "acc_plus": Share("both", "pairs"),
    "unread": Share("unread", "questions", fixed=False),
}


@dataclass(frozen=True)
class MmePair:
    """Two questions on an image (or its file), each with True if yes is right."""

    image: Source
    questions: tuple[tuple[str, bool], ...]
    subtask: str
    id: str | None = field(default=None, compare=False)

    @property
    def expected(self) -> list[str]:
        """The right answers."""
        return ["yes" if true else "no" for _, true in self.questions]

    def chats(self) -> list[Chat]:
        """Return the chats of both questions; raise ValueError if the image's file does not decode."""
        return [chat([self.image], question) for question, _ in self.questions]

    def truths(self) -> list[bool]:
        """Return whether yes is right, of each question."""
        return [true for _, true in self.questions]

    @property
    def picture(self) -> Path | int:
        """A key that distinguishes the picture from others."""
        return self.image if isinstance(self.image, Path) else id(self.image)


def tally(sample: MmePair, replies: Sequence[Reply]) -> dict[str, float]:
    """Return both answers' contribution to the sums of `scores`; an answer that is neither yes nor no is wrong."""
    answers = [yes(reply.text) for reply in replies]
    right = [answer is true for answer, (_, true) in zip(answers, sample.questions, strict=True)]
    return {
        "pairs": 1.0,
        "questions": float(len(right)),
        "right": float(sum(right)),
        "both": float(all(right)),
        "unread": float(answers.count(None)),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return accuracy over questions (acc), over images with both right (acc_plus), and 100 times their sum (score)."""
    acc, both_right = ratio(sums["right"], sums["questions"]), ratio(sums["both"], sums["pairs"])
    return {
        "acc": acc,
        "acc_plus": both_right,
        "score": 100 * (acc + both_right),
        "unread": ratio(sums["unread"], sums["questions"]),
    }


def totals(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return by condition the sums of the subtasks' scores, for perception and, if there are any, for cognition."""
    out = {}
    for name, parts in results.items():
        by_task = {task: scores["score"]["value"] for task, scores in parts["MME"].items() if task != "all"}
        cognition = [score for task, score in by_task.items() if task in COGNITION]
        perception = [score for task, score in by_task.items() if task not in COGNITION]
        sums = {"perception": perception, "cognition": cognition}
        out[name] = {kind: float(sum(values)) for kind, values in sums.items() if values}
    return out
