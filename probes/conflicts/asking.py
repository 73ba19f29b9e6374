"""The two questions of every sample, asked under several conditions in one stream of questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probes.answering.base import Answerer, Push, Question, Reply
from probes.answering.letters import letter
from probes.answering.replies import replies
from probes.conflicts.samples import LETTERS, ConflictSample, Setting, Side, Wording, messages, prompt
from probes.conflicts.shares import Outcome, outcome
from probes.harness.ledger import tell

MAX_TOKENS = 24
"""Enough tokens for "The correct answer is B. playing in a field"; a model that answers with a letter stops by itself."""

CHAIN_TOKENS = 512
"""Enough tokens for a chain of thought, as in the authors' qwen_vl_7b.sh."""


@dataclass(frozen=True)
class Condition:
    """A setting and a push under which samples are asked.

    `shots` are the solved examples of the settings that show some, `wording` is that of the instructions. `report_key` is
    the key in report.json under which its results are found, if they have one.
    """

    setting: Setting = "plain"
    push: Push | None = None
    shots: tuple[ConflictSample, ...] = ()
    wording: Wording = "paper"
    report_key: str | None = None

    @property
    def name(self) -> str:
        """The name in progress displays, which does not distinguish strengths, layers and vectors."""
        setting = self.setting.replace("_", " ")
        if self.push is None:
            return setting
        return f"{setting if setting != 'plain' else ''} steered toward {self.push.toward}".strip()

    def question(self, sample: ConflictSample, swapped: bool) -> Question:
        limit = CHAIN_TOKENS if self.setting.startswith("chain") else MAX_TOKENS
        return Question(messages(sample, self.setting, swapped, self.shots, self.wording), self.push, limit)


@dataclass(frozen=True)
class Answers:
    """The answers to the samples of one condition.

    For each sample it holds the letters chosen unswapped and swapped (None = no option), and the replies themselves.
    """

    letters: list[tuple[str | None, str | None]] = field(default_factory=list)
    replies: list[tuple[Reply, Reply]] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        """The category of every sample."""
        return [outcome(*pair) for pair in self.letters]

    @property
    def sides(self) -> list[tuple[Side | None, Side | None]]:
        """The side that every question's answer supports, unswapped and swapped; None = neither."""
        first: dict[str | None, Side] = {"A": "vision", "B": "text"}
        second: dict[str | None, Side] = {"A": "text", "B": "vision"}
        return [(first.get(letter), second.get(letter_turned)) for letter, letter_turned in self.letters]

    def right(self, side: Side) -> list[float]:
        """Return for every sample the share of its two questions that were answered with that side's answer."""
        expected = ("A", "B") if side == "vision" else ("B", "A")
        return [((first == expected[0]) + (second == expected[1])) / 2 for first, second in self.letters]

    def accuracy(self, side: Side = "vision") -> float:
        """Return the share of the questions (two a sample) that were answered with the vision (or the text) answer."""
        return sum(self.right(side)) / len(self.letters) if self.letters else 0.0

    @property
    def attention_ratio(self) -> float | None:
        """The mean attention ratio over the questions in which it was measured."""
        ratios = [reply.attention_ratio for pair in self.replies for reply in pair if reply.attention_ratio is not None]
        return sum(ratios) / len(ratios) if ratios else None

    @property
    def attention_by_layer(self) -> np.ndarray | None:
        """The attention ratio in each layer, mean over a sample's questions: (samples, layers).

        NaN for a sample without any, None if no sample has one.
        """
        rows = [
            [(reply.diagnostics or {}).get("modality", {}).get("by_layer") for reply in pair] for pair in self.replies
        ]
        layers = max((len(row) for pair in rows for row in pair if row is not None), default=0)
        if not layers:
            return None
        unknown = [None] * layers
        every = np.array([[unknown if row is None else row for row in pair] for pair in rows], float)
        is_known = ~np.isnan(every)
        with np.errstate(invalid="ignore"):
            return np.where(is_known, every, 0).sum(1) / is_known.sum(1)

    def of(self, chosen: Sequence[int]) -> Answers:
        """Return the answers to the samples of these numbers."""
        return Answers([self.letters[i] for i in chosen], [self.replies[i] for i in chosen])


def ask(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    conditions: Sequence[Condition],
    *,
    title: str = "",
    quiet: bool = False,
) -> list[Answers]:
    """Ask every sample in both orders under every condition, and return one `Answers` per condition.

    Conditions that differ only in steering run beside each other in one batch.
    """
    plan = [(condition, sample, swapped) for sample in samples for condition in conditions for swapped in (False, True)]

    def questions() -> Iterator[Question]:
        for condition, sample, swapped in plan:
            yield condition.question(sample, swapped)

    stream = replies(answerer, questions(), [condition.name for condition, _, _ in plan], title=title, quiet=quiet)
    answers = [Answers() for _ in conditions]
    pairs = zip(stream, stream)  # noqa: B905 -- the same iterator twice: the two orders of a sample
    for sample in samples:
        for answer in answers:
            pair = next(pairs)
            first, second = (
                letter(reply.text, sample.options(swapped)) for reply, swapped in zip(pair, (False, True), strict=True)
            )
            answer.letters.append((first, second))
            answer.replies.append(pair)
    next(stream, None)  # ends the stream, and closes its resources
    for condition, answer in zip(conditions, answers, strict=True):
        tell(answerer, _rows(title, condition, samples, answer))
    return answers


def _rows(
    title: str, condition: Condition, samples: Sequence[ConflictSample], answers: Answers
) -> Iterator[dict[str, Any]]:
    """Yield a row for every question, with its sample, its options in their order, the answer and its score.

    `counts_for` is the category of the sample, which also takes the other order into account.
    """
    push = None if condition.push is None else _push(condition.push)
    of = {"part": title, "condition": condition.name, "report_key": condition.report_key, "push": push}
    for number, (sample, letters, sides, pair, counted) in enumerate(
        zip(samples, answers.letters, answers.sides, answers.replies, answers.outcomes, strict=True)
    ):
        for swapped in (False, True):
            yield of | {
                "sample": number, "id": sample.id, "task": sample.task, "swapped": swapped,
                "question": prompt(sample, condition.setting, swapped, condition.wording),
                "options": dict(zip(LETTERS, sample.options(swapped), strict=True)),
                "answer": pair[swapped].text, "letter": letters[swapped], "side": sides[swapped],
                "counts_for": counted, "attention_ratio": pair[swapped].attention_ratio,
            }  # fmt: skip


def _push(push: Push) -> dict[str, Any]:
    """Return a push as JSON, with the vector by its name."""
    name = push.vector if isinstance(push.vector, str) else push.vector.name
    layers = push.layers or (None if isinstance(push.vector, str) else push.vector.layers)
    return {
        "vector": name, "toward": push.toward, "strength": push.strength, "layers": layers and list(layers),
        "criterion": push.criterion.name if push.toward == "auto" else None,
    }  # fmt: skip
