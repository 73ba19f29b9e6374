"""Questions whose answers can be checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from probes.answering.base import Chat
from probes.harness.pictures import Source, chat
from probes.image_qa import rows


@dataclass(frozen=True)
class Checked:
    """A question with its accepted answers.

    accepted: an answer is right if it holds one of these as whole words. part: a benchmark's name, or another grouping of
    questions in a report. alike: the stratum of equally hard answers (the kind of question, the amount of noise), so that
    they can be compared without the difficulty separating them.
    """

    images: tuple[Source, ...]
    question: str
    accepted: tuple[str, ...]
    part: str = "answers"
    alike: str = ""
    id: str | None = field(default=None, compare=False)

    def chat(self) -> Chat:
        """Return the chat of the question; raise ValueError if an image's file does not decode."""
        return chat(self.images, self.question)

    def right(self, answer: str) -> bool:
        """Return whether an answer holds an accepted one."""
        words = f" {_words(answer)} "
        return any(f" {_words(accepted)} " in words for accepted in self.accepted)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[\w']+", text.casefold()))


def load(file: str | Path, skipped: list[str] | None = None) -> list[Checked]:
    """Return samples from JSON Lines.

    A row has `images` (paths relative to the file, or one), `question`, `answer` (or several that count), and `part` if they
    are of several benchmarks. Rows that lack something are left out and added to `skipped`. Raises ValueError that names the
    invalid file and row.
    """
    path = Path(file)
    samples = rows.parse(path, rows.read(path), partial(_checked, path.parent), skipped)
    if not samples:
        raise ValueError(f"{path} holds no samples.")
    return samples


def _checked(folder: Path, row: Mapping[str, Any], number: int) -> Checked:
    names, question, answers = (rows.texts(row, name) for name in ("images", "question", "answer"))
    if len(question) > 1:
        raise ValueError("'question' must be a string")
    if not all(map(_words, answers)):
        raise ValueError("'answer' must contain words")
    part = str(row.get("part", "answers"))
    images = tuple(rows.image(folder, name) for name in names)
    return Checked(images, question[0], answers, part, part, rows.named(images[0], number))
