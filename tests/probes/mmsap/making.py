"""Questions of the three parts, and the answer of a model that is what it is."""

from __future__ import annotations

import re
from collections.abc import Callable

from PIL import Image

from probes.answering.base import Question
from probes.mmsap.samples import Part, SapSample
from steering.interventions.refusal import REFUSAL
from tests.probes.conftest import text_of


def sample(part: Part, number: int = 0, subtask: str = "Color") -> SapSample:
    answer = None if part == "beyond" else "red"
    question = f"{part} {number}: what color is it?"
    return SapSample(
        f"{part} {number}", part, subtask, Image.new("RGB", (8, 8)), question, ("red", "blue", "teal"), answer
    )


def options_of(question: Question) -> dict[str, str]:
    """Letters by option."""
    return {text: letter for letter, text in re.findall(r"^([A-Z])\. (.*)$", text_of(question), re.MULTILINE)}


def choosing(choice: Callable[[str, Question], str | None]) -> Callable[[Question], str]:
    """Return an answerer that gives the letter of an option chosen by the question's first words.

    It answers in words if that option is not offered.
    """

    def answer(question: Question) -> str:
        chosen = choice(text_of(question).split(":")[0], question) or REFUSAL
        return options_of(question).get(chosen, f"{chosen}.")

    return answer
