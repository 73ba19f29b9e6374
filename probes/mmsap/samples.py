"""What MM-SAP asks: questions about a picture with options, one of which is to refuse (section 3.2)."""

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
    """One question. options: without the refusal. answer: the right one of them, None where no picture could tell it, which
    is so in BeyondVisQA and nowhere else."""

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
        """The options that are offered in one run, in an order of its own: with the refusal, and where that would not tell
        whether the model knows, which it would not in KnowVisQA, without it."""
        order = [*self.options, REFUSAL]
        random.Random(f"{seed} {run} {self.id}").shuffle(order)
        forced = [tuple(one for one in order if one != REFUSAL)] if self.part == "know" else []
        return [tuple(order), *forced]

    def chats(self, runs: int, seed: int) -> list[Chat]:
        """What is asked, run by run; raises ValueError where the picture's file does not decode."""
        return [self._chat(options) for run in range(runs) for options in self.offered(run, seed)]

    def _chat(self, options: Sequence[str]) -> Chat:
        lines = [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]
        text = "\n".join([self.question, *lines, BY_LETTER])
        shown = {"type": "image", "image": picture(self.image, f"sample {self.id}")}
        return [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]


def asked(part: Part) -> int:
    """How many questions a sample of that part is in one run."""
    return 2 if part == "know" else 1
