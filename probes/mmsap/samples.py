"""MM-SAP's questions about a picture, with options of which one is to refuse (section 3.2)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal, get_args

from probes.answering.base import Chat
from probes.harness.pictures import Source, picture
from steering.interventions.refusal import BY_LETTER, REFUSAL

Part = Literal["basic", "know", "beyond"]
PARTS: tuple[Part, ...] = get_args(Part)
TITLES: dict[Part, str] = {"basic": "BasicVisQA", "know": "KnowVisQA", "beyond": "BeyondVisQA"}


@dataclass(frozen=True)
class SapSample:
    """A question about a picture.

    options: without the refusal. answer: the right one of them, None if no picture could show it, which is the case in
    BeyondVisQA only.
    """

    id: str
    part: Part
    subtask: str
    image: Source
    question: str
    options: tuple[str, ...]
    answer: str | None

    @property
    def expected(self) -> str:
        """The right option, or the refusal."""
        return REFUSAL if self.answer is None else self.answer

    def offered(self, run: int, seed: int) -> list[tuple[str, ...]]:
        """Return the sets of options offered in one run, each in that run's order.

        One set holds the refusal. In KnowVisQA, where a refusal hides whether the model knows, a second set is without it.
        """
        order = [*self.options, REFUSAL]
        random.Random(f"{seed} {run} {self.id}").shuffle(order)
        forced = [tuple(option for option in order if option != REFUSAL)] if self.part == "know" else []
        return [tuple(order), *forced]

    def chats(self, runs: int, seed: int) -> list[Chat]:
        """Return the chats, run by run; raise ValueError if the picture's file does not decode."""
        return [self._chat(options) for run in range(runs) for options in self.offered(run, seed)]

    def _chat(self, options: Sequence[str]) -> Chat:
        lines = [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]
        text = "\n".join([self.question, *lines, BY_LETTER])
        image = {"type": "image", "image": picture(self.image, f"sample {self.id}")}
        return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def questions_per_run(part: Part) -> int:
    """Return the number of questions that a sample of that part has in one run."""
    return 2 if part == "know" else 1
