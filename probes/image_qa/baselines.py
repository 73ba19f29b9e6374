"""The ways of asking that steering is compared with (modality-preference paper, Tables 1 to 3).

They are the instruction to rely on one modality, that with a chain of thought, and four solved examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from probes.answering.base import Chat
from probes.harness.comparison import PromptChange

SHOTS = 4
"""The number of solved examples, as in the paper."""
CHAIN_TOKENS = 512
"""Enough tokens for a chain of thought, as in the authors' qwen_vl_7b.sh."""
THINK = "Think step by step, and end with a line 'Answer:' and your answer."
NAMES = ("instruction", "chain of thought", "four-shot")


class Solved(Protocol):
    """A sample that can serve as an example."""

    @property
    def expected(self) -> Any:
        """The right answer."""

    def chats(self) -> list[Chat]:
        """Return the chats of its questions."""


@dataclass(frozen=True)
class Instructed:
    """The instruction of a benchmark toward the modality that answers it, and how an example's answer is written."""

    text: str
    written: Callable[[Any], str] = str

    def changes(self, examples: Sequence[Solved]) -> Mapping[str, PromptChange]:
        """Return the prompts' changes by condition; without four examples there are none to show."""
        changes = {
            "instruction": PromptChange(self.text),
            "chain of thought": PromptChange(f"{self.text} {THINK}", read=concluded, max_tokens=CHAIN_TOKENS),
        }
        if len(examples) >= SHOTS:
            shots = tuple((example.chats()[0], self.written(example.expected)) for example in examples[:SHOTS])
            changes["four-shot"] = PromptChange(shots=shots)
        return changes


def concluded(answer: str) -> str:
    """Return what follows the last "Answer:"; without one the last line, where a chain of thought ends."""
    if match := list(re.finditer(r"answer\s*(?:is)?\s*:", answer, re.IGNORECASE)):
        return answer[match[-1].end() :].strip(" *\n")
    return answer.strip().rpartition("\n")[2]
