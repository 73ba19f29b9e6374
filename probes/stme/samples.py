"""The benchmark's samples: questions about several pictures of which one, the target, holds the answer.

Source: implicit visual misunderstanding paper, section 2.2.
"""

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
"""Tasks with a scoring of their own.

They ask for the picture most like the last one, the anchor; for the picture of a caption; and for a special word or number
that one of the pictures holds.
"""
EASY = (CAPTION, NEEDLE)

Difficulty = Literal["easy", "hard"]

WHICH = (
    "Respond with the numbers of all images related to the correct answer in the format of list: [related image1 number, "
    "related image2 number,...]"
)
"""The request for the target itself (the authors' `answer_target.py`)."""

_NUMBERED = re.compile(r"\b((?:image|picture)\s*#?\s*)(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class TargetSample:
    """A question about several pictures.

    texts: the text before each picture, and behind the last one. target: the picture that holds the answer, from 1. choices:
    the options' texts, none for an open question. tail: the text behind the question. pixels: the size to which a picture is
    scaled down, None for its own. spot: the place of the answer in the target (left, top, right, bottom, of 1), None if
    unknown.
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
        """True if the last picture is the one with which the others are compared."""
        return self.task == ANCHOR

    @property
    def expected(self) -> dict[str, Any]:
        """The right answer, and the picture that holds it."""
        return {"response": self.response, "target": self.target}

    @property
    def candidates(self) -> int:
        """The number of pictures among which the target is."""
        return len(self.images) - self.anchor

    @property
    def difficulty(self) -> Difficulty:
        return "easy" if self.task in EASY else "hard"

    @property
    def movable(self) -> bool:
        """True if the pictures may change places: the texts before them differ in nothing but numbers."""
        labels = {re.sub(r"\d+", "#", text).strip() for text in self.texts[1:-1]}
        return len(labels) < 2

    def in_order(self, order: Sequence[int]) -> TargetSample:
        """Return the sample with its pictures in another order.

        `order` (candidates,) holds the old places from 0 by the new ones. Numbers of pictures in question, options and
        response are renumbered; the anchor stays last.
        """
        new = {old + 1: place for place, old in enumerate(order, 1)}

        def renamed(text: str) -> str:
            return _NUMBERED.sub(lambda match: match[1] + str(new.get(int(match[2]), match[2])), text)

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
        """Return the question with its pictures; raise ValueError if the file of one does not decode."""
        return self._message([self.picture(number) for number in range(1, len(self.images) + 1)], self.tail)

    def which(self) -> Chat:
        """Return the question for the target's number instead of the answer; a caption's answer is that number."""
        pictures = [self.picture(number) for number in range(1, len(self.images) + 1)]
        return self._message(pictures, self.tail if self.task == CAPTION else f"\n{WHICH}")

    def blind(self) -> Chat:
        """Return the question without its pictures, and without the texts between them."""
        return [{"role": "user", "content": (self.texts[0] + self.texts[-1] + self.tail).strip()}]

    def without(self, hidden: int) -> Chat:
        """Return the question with a gray picture in the place of one, from 1."""
        pictures = [self.picture(number) for number in range(1, len(self.images) + 1)]
        pictures[hidden - 1] = Image.new("RGB", pictures[hidden - 1].size, GRAY)
        return self._message(pictures, self.tail)

    def picture(self, number: int) -> Image.Image:
        """Return one of the pictures, from 1, scaled down to at most `pixels`."""
        full_picture = picture(self.images[number - 1], f"sample {self.id}")
        if self.pixels is None or full_picture.width * full_picture.height <= self.pixels:
            return full_picture
        scale = (self.pixels / (full_picture.width * full_picture.height)) ** 0.5
        return full_picture.resize((max(1, int(full_picture.width * scale)), max(1, int(full_picture.height * scale))))

    def _message(self, pictures: Sequence[Image.Image], tail: str) -> Chat:
        content: list[dict[str, Any]] = []
        for text, image in zip(self.texts, pictures, strict=False):
            content += [{"type": "text", "text": text}] * bool(text) + [{"type": "image", "image": image}]
        content.append({"type": "text", "text": self.texts[-1] + tail})
        return [{"role": "user", "content": content}]
