"""Prompting methods that change nothing inside the model; the paper compares SAGE with them (its Tables 6 and 10).

Each takes a question and returns one reply.

- SC, self-consistency (Wang et al. 2022): several answers are sampled, and one with the most frequent meaning is returned.
- SR, self-refine (Madaan et al. 2023): the model criticises its answer and answers again.
- API, attention prompting on the image (Yu et al. 2024): attended areas stay bright, the rest is darkened, and the question
  is asked again. The maps are the model's own, so that it needs Helmsight.
- Zoom-Refine (Yu et al. 2025): the model names the region that matters, sees it enlarged beside the pictures, and answers
  again; if it names none, its first answer stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from probes.answering.base import Question, Reply
from probes.answering.talks import Talk
from probes.harness.pictures import chat
from probes.image_pairs.claims import counted, read, yes
from steering import Diagnose

DRAWN, TEMPERATURE = 5, 0.7
"""The number of answers that self-consistency samples, and the temperature."""
PATCHES = Diagnose(frozenset({"patches"}))
DIM = 0.4
"""The brightness that the least attended areas keep."""
CRITICISE = "Look at the pictures again. What is wrong or missing in your answer?"
REFINE = "Answer the question again, better where that is needed."
LOCATE = "Which region of the pictures answers this question? Give its box as [x1, y1, x2, y2], from 0 to 1000: "
ZOOMED = "You answered: {answer}\nThe last pictures show the region that matters, enlarged. Answer again: "
_BOX = re.compile(r"\[\s*" + r"\s*,\s*".join([r"(\d{1,4})"] * 4) + r"\s*\]")


@dataclass(frozen=True)
class Method:
    """A prompting method.

    `most`: the largest number of questions that it asks. `reads`: it needs diagnostics, which only Helmsight provides.
    """

    talk: Callable[[Question, Sequence[str]], Talk[Reply]]
    most: int = 1
    reads: bool = False

    def __call__(self, question: Question, categories: Sequence[str]) -> Talk[Reply]:
        """Return a talk that ends with one reply; `categories` are the names of objects that an answer may be about."""
        return self.talk(question, categories)


def _plain(question: Question, categories: Sequence[str]) -> Talk[Reply]:
    (reply,) = yield [question]
    return reply


def _consistent(question: Question, categories: Sequence[str]) -> Talk[Reply]:
    replies = yield [replace(question, temperature=TEMPERATURE, seed=seed) for seed in range(DRAWN)]
    meanings = [_meaning(reply.text, categories) for reply in replies]
    return replies[meanings.index(Counter(meanings).most_common(1)[0][0])]  # on a tie, the first one


def _meaning(answer: str, categories: Sequence[str]) -> object:
    """Return the meaning of an answer, whatever its wording."""
    meaning = (yes(answer), counted(answer), frozenset(Counter(read(answer, categories)).items()))
    return meaning if any((meaning[0] is not None, meaning[1] is not None, meaning[2])) else answer.strip().lower()


def _refined(question: Question, categories: Sequence[str]) -> Talk[Reply]:
    (first,) = yield [question]
    chat = [*question.chat, _message("assistant", first.text or "-"), _message("user", CRITICISE)]
    (critique,) = yield [replace(question, chat=chat)]
    chat = [*chat, _message("assistant", critique.text or "-"), _message("user", f"{REFINE} {_text(question)}")]
    (last,) = yield [replace(question, chat=chat)]
    return last


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _attended(question: Question, categories: Sequence[str]) -> Talk[Reply]:
    (first,) = yield [replace(question, diagnose=PATCHES)]
    heats = _heats(first.diagnostics or {})
    if not heats:
        return first
    brightened = [_darken(image, heat) for image, heat in zip(_pictures(question), heats, strict=True)]
    (last,) = yield [_with_pictures(question, brightened, _text(question))]
    return last


def _heats(diagnostics: Mapping[str, Any]) -> list[np.ndarray]:
    """Return a map (rows, columns) for each picture, from 0 to 1: the mean of its `patches` over layers.

    Empty if the tokens of a picture do not form a grid.
    """
    grids = [image["grid"] for image in diagnostics.get("images", ())]
    if not grids or not all(grids):
        return []
    return [
        _scale(np.mean(patches["rho"], 0).reshape(grid))
        for patches, grid in zip(diagnostics["patches"], grids, strict=True)
    ]


def _scale(values: np.ndarray) -> np.ndarray:
    spread = values.max() - values.min()
    return np.asarray((values - values.min()) / spread if spread else np.ones_like(values))


def _darken(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """Return the picture, darkened where the heat is low."""
    wide = Image.fromarray(heat.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    bright = DIM + (1 - DIM) * np.asarray(wide).clip(0, 1)[..., None]
    return Image.fromarray((np.asarray(image.convert("RGB")) * bright).round().astype(np.uint8))


def _zoomed(question: Question, categories: Sequence[str]) -> Talk[Reply]:
    pictures = _pictures(question)
    where = _with_pictures(question, pictures, LOCATE + _text(question))
    first, located = yield [question, where]
    box = region(located.text)
    if box is None:
        return first
    closer = [_crop(image, box) for image in pictures]
    text = ZOOMED.format(answer=first.text) + _text(question)
    (last,) = yield [_with_pictures(question, [*pictures, *closer], text)]
    return last


def region(answer: str) -> tuple[float, float, float, float] | None:
    """Return the first box of an answer as shares of a picture's sides; None if it names none, or an empty one."""
    match = _BOX.search(answer)
    if match is None:
        return None
    left, top, right, bottom = (min(int(edge), 1000) / 1000 for edge in match.groups())
    return (left, top, right, bottom) if left < right and top < bottom else None


def _crop(image: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    """Return the region, at least 28 pixels on a side, enlarged to the size of the picture."""
    width, height = image.size
    left, top = min(round(box[0] * width), max(width - 28, 0)), min(round(box[1] * height), max(height - 28, 0))
    right, bottom = max(round(box[2] * width), left + 28), max(round(box[3] * height), top + 28)
    return image.crop((left, top, min(right, width), min(bottom, height))).resize(image.size)


def _pictures(question: Question) -> list[Image.Image]:
    (message,) = question.chat
    return [part["image"] for part in message["content"] if part["type"] == "image"]


def _text(question: Question) -> str:
    (message,) = question.chat
    return str(message["content"][-1]["text"])


def _with_pictures(question: Question, pictures: Sequence[Image.Image], text: str) -> Question:
    return replace(question, chat=chat(pictures, text))


plain = Method(_plain)
METHODS: Mapping[str, Method] = {
    "SC": Method(_consistent, DRAWN),
    "SR": Method(_refined, 3),
    "API": Method(_attended, 2, reads=True),
    "Zoom-Refine": Method(_zoomed, 3),
}
