"""What the benchmark asks: questions about several pictures of which one, the target, holds the answer (implicit visual
misunderstanding paper, section 2.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from PIL import Image

from probes.answering.base import Chat
from probes.harness.pictures import Source, picture
from steering.prompt.chat import GRAY

ANCHOR, CAPTION, NEEDLE = "GPR1200", "CM", "ImageNeedleInAHaystack"
"""Tasks that are scored in a way of their own: which picture is most like the last one, the anchor; which picture a caption
is of; what special word or number one of the pictures holds."""
EASY = (CAPTION, NEEDLE)

Difficulty = Literal["easy", "hard"]

WHICH = (
    "Respond with the numbers of all images related to the correct answer in the format of list: [related image1 number, "
    "related image2 number,...]"
)
"""Asks for the target directly (the authors' `answer_target.py`)."""

_NUMBERED = re.compile(r"\b((?:image|picture)\s*#?\s*)(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class TargetSample:
    """A question about several pictures.

    texts: what stands before each picture, and behind the last one. target: the picture that holds the answer, from 1.
    choices: the options' texts, none for an open question. tail: what is said behind the question. pixels: what a picture
    is scaled down to, None for as it is. spot: where in the target the answer is (left, top, right, bottom, of 1), None
    where nobody knows.
    """

    id: str
    task: str
    texts: tuple[str, ...]
    images: tuple[Source, ...]
    target: int
    response: str
    choices: tuple[str, ...] = ()
    tail: str = ""
    pixels: int | None = None
    spot: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.images) + 1:
            raise ValueError(f"sample {self.id}: {len(self.images)} pictures have {len(self.texts) - 1} places")
        if not 1 <= self.target <= self.candidates:
            raise ValueError(f"sample {self.id}: the target {self.target} is none of {self.candidates} pictures")

    @property
    def anchor(self) -> bool:
        """Whether the last picture is what the others are compared with."""
        return self.task == ANCHOR

    @property
    def expected(self) -> dict[str, Any]:
        """The right answer, and which picture holds it."""
        return {"response": self.response, "target": self.target}

    @property
    def candidates(self) -> int:
        """How many pictures the target is one of."""
        return len(self.images) - self.anchor

    @property
    def difficulty(self) -> Difficulty:
        return "easy" if self.task in EASY else "hard"

    @property
    def movable(self) -> bool:
        """Whether the pictures may change places: the texts before them tell them apart by nothing but numbers."""
        labels = {re.sub(r"\d+", "#", text).strip() for text in self.texts[1:-1]}
        return len(labels) < 2

    def in_order(self, order: Sequence[int]) -> TargetSample:
        """The same with its pictures in another order, `order` (candidates,) the old places from 0 by the new ones. Where
        question, options or response call a picture by its number, they get the new one; the anchor stays the last."""
        new = {old + 1: place for place, old in enumerate(order, 1)}

        def renamed(text: str) -> str:
            return _NUMBERED.sub(lambda found: found[1] + str(new.get(int(found[2]), found[2])), text)

        target = new[self.target]
        bare = self.response.strip() == str(self.target) and not self.choices
        return replace(
            self,
            texts=(*self.texts[:-1], renamed(self.texts[-1])),
            images=(*(self.images[old] for old in order), *self.images[self.candidates :]),
            target=target,
            response=str(target) if bare else renamed(self.response),
            choices=tuple(map(renamed, self.choices)),
        )

    def chat(self) -> Chat:
        """The question with its pictures; raises ValueError where the file of one does not decode."""
        return self._said([self.picture(number) for number in range(1, len(self.images) + 1)], self.tail)

    def which(self) -> Chat:
        """What asks for the number of the target in the place of the answer; a caption's answer is that number."""
        pictures = [self.picture(number) for number in range(1, len(self.images) + 1)]
        return self._said(pictures, self.tail if self.task == CAPTION else f"\n{WHICH}")

    def blind(self) -> Chat:
        """The question without its pictures, and without what stands between them."""
        return [{"role": "user", "content": (self.texts[0] + self.texts[-1] + self.tail).strip()}]

    def without(self, hidden: int) -> Chat:
        """The question with a gray picture in the place of one, from 1."""
        pictures = [self.picture(number) for number in range(1, len(self.images) + 1)]
        pictures[hidden - 1] = Image.new("RGB", pictures[hidden - 1].size, GRAY)
        return self._said(pictures, self.tail)

    def picture(self, number: int) -> Image.Image:
        """One of the pictures, from 1, scaled down to at most `pixels`."""
        found = picture(self.images[number - 1], f"sample {self.id}")
        if self.pixels is None or found.width * found.height <= self.pixels:
            return found
        scale = (self.pixels / (found.width * found.height)) ** 0.5
        return found.resize((max(1, int(found.width * scale)), max(1, int(found.height * scale))))

    def _said(self, pictures: Sequence[Image.Image], tail: str) -> Chat:
        content: list[dict[str, Any]] = []
        for text, one in zip(self.texts, pictures, strict=False):
            content += [{"type": "text", "text": text}] * bool(text) + [{"type": "image", "image": one}]
        content.append({"type": "text", "text": self.texts[-1] + tail})
        return [{"role": "user", "content": content}]
