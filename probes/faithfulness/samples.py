"""A question with an answer that is faithful to its pictures and one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from probes.answering.base import Chat
from probes.harness.pictures import Source, chat
from probes.image_qa import rows


@dataclass(frozen=True)
class ForcedAnswerSample:
    """A question with two answers that differ in their claims, and should differ in nothing else.

    kind: the kind of question, by which samples are grouped.
    """

    images: tuple[Source, ...]
    question: str
    faithful: str
    unfaithful: str
    kind: str = "answers"

    def chat(self) -> Chat:
        """Return the chat of the question; raise ValueError if an image's file does not decode."""
        return chat(self.images, self.question)


def load(file: str | Path, skipped: list[str] | None = None) -> list[ForcedAnswerSample]:
    """Return samples from JSON Lines.

    A row has `images` (paths relative to the file, or one), `question`, `faithful`, `unfaithful`, and `kind` if there are
    several kinds. Rows that lack something are left out and added to `skipped`. Raises ValueError that names the invalid
    file and row.
    """
    path = Path(file)
    samples = rows.parse(path, rows.read(path), partial(_sample, path.parent), skipped)
    if not samples:
        raise ValueError(f"{path} holds no samples.")
    return samples


def _sample(folder: Path, row: Mapping[str, Any], number: int) -> ForcedAnswerSample:
    names, question, *answers = (rows.texts(row, name) for name in ("images", "question", "faithful", "unfaithful"))
    if any(len(texts) > 1 for texts in (question, *answers)):
        raise ValueError("'question', 'faithful' and 'unfaithful' must be strings")
    (faithful,), (unfaithful,) = answers
    if faithful == unfaithful:
        raise ValueError("the two answers are the same")
    images = tuple(rows.image(folder, name) for name in names)
    return ForcedAnswerSample(images, question[0], faithful, unfaithful, str(row.get("kind", "answers")))
