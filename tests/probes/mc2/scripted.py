"""A scripted model: it answers questions about numbered balls by a rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from PIL import Image

from probes.answering.base import Push, Question, Reply
from probes.conflicts import samples as mc2
from probes.conflicts.samples import ConflictSample
from probes.mc2.evaluate import Candidate
from steering import SteeringVector
from tests.probes.conftest import make_samples, seen


@dataclass(frozen=True)
class AskedQuestion:
    """A question about one of `balls`, read back from its chat: which ball, the order, what is shown."""

    ball: int
    swapped: bool
    setting: str
    push: Push | None
    question: Question

    @property
    def image(self) -> Image.Image | None:
        parts = self.question.chat[-1]["content"]
        return parts[0]["image"] if len(parts) == 2 else None

    @property
    def text(self) -> str:
        return str(self.question.chat[-1]["content"][-1]["text"])

    @classmethod
    def of(cls, question: Question) -> AskedQuestion:
        *shots, last = question.chat
        text = last["content"][-1]["text"]
        match = re.search(r"ball (\d+)\?", text)
        assert match is not None
        sides = [side for side in mc2.SIDES if mc2.WORDINGS["paper"][side] in text]
        setting: str = sides[0] if sides else "plain"
        if mc2.CHAIN_REQUEST in text:
            setting = f"chain_{setting}"
        elif shots:
            setting = "shots_vision" if shots[1]["content"] == "A" else "shots_text"
        elif len(last["content"]) == 1:
            setting = "context_only"
        elif not text.startswith("Text context: "):
            setting = "image_only"
        return cls(int(match[1]), "A. blue" in text, setting, question.push, question)


@dataclass
class Scripted:
    """Answers by a rule and keeps what it was asked."""

    rule: Callable[[AskedQuestion], Reply]
    asked: list[AskedQuestion] = field(default_factory=list)
    ended: bool = True
    identity: str = "scripted"

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        self.ended = False
        for question in questions:
            self.asked.append(AskedQuestion.of(question))
            yield self.rule(self.asked[-1])
        self.ended = True


def balls(count: int) -> list[ConflictSample]:
    """Return samples that `AskedQuestion` distinguishes, with alternating tasks."""
    return [
        ConflictSample(
            id=f"ball-{i}",
            task=("color", "shape")[i % 2],
            image=Image.new("RGB", (8, 8), (10 * i, 0, 0)),
            question=f"What color is ball {i}?",
            answer_vision="red",
            answer_text="blue",
            context=f"Ball number {i} is blue.",
        )
        for i in range(count)
    ]


def said(code: str, swapped: bool) -> str:
    """Return an answer: v the image's, t the text's, a and b that letter in either order, n no letter."""
    if code in "vt":
        return "AB"[(code == "t") != swapped]
    return {"a": "A", "b": "B", "n": "Sorry."}[code]


def simple_vector(name: str = "preference", layers: tuple[int, ...] = (1,)) -> SteeringVector:
    """Three layers of four dimensions."""
    direction = torch.tensor([[1.0, 0, 0, 0], [0, 3, 4, 0], [0, 0, 0, 2]])
    return SteeringVector(
        name, direction, torch.tensor([1.0, 2.0, 0.5]), torch.ones(3), torch.ones(3), layers, "0" * 64
    )


SCRIPT = {
    "plain": "vvtan",
    "vision": "vvvvt",
    "text": "ttttt",
    "instruct_vision": "vvnnv",
    "instruct_text": "tttvv",
    "chain_vision": "vvtta",
    "chain_text": "ttttv",
    "shots_vision": "vnnnn",
    "shots_text": "tttna",
    "plain image_only": "vvvaa",
    "plain context_only": "tttvn",
    "vision image_only": "vvvvv",
    "vision context_only": "ttvvv",
    "text image_only": "vvttt",
    "text context_only": "ttttb",
}
VECTOR = simple_vector()
STEERING = Candidate(VECTOR, 1.5, (0, 2))
SHOTS = make_samples(4)


def script_name(question: AskedQuestion) -> str:
    """Return the key of a question in SCRIPT."""
    steered = "plain" if question.push is None else question.push.toward
    if question.setting.endswith("_only"):
        return f"{steered} {question.setting}"
    if question.setting in ("vision", "text"):
        return f"instruct_{question.setting}"
    return steered if question.setting == "plain" else question.setting


def ratio(question: AskedQuestion) -> float | None:
    """.0 to .4 for the balls plainly asked, the swapped ones .1 more; unknown for ball 3; .5 where anything is done."""
    if script_name(question) != "plain":
        return 0.5
    return None if question.ball == 3 else (question.ball + question.swapped) / 10


def by_script(question: AskedQuestion) -> Reply:
    return Reply(said(SCRIPT[script_name(question)][question.ball], question.swapped), seen(ratio(question)))
