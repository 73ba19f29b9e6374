"""Ask an engine the two questions of every sample under several conditions, all in one stream of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from probes.mc2 import Outcome, Sample, Setting, letter, messages, outcome
from steering import Engine, Request, Sampling
from steering.interventions.steer import Steer

Question = tuple["Condition", Sample, bool]

MAX_TOKENS = 24
"""Enough for "The correct answer is B. playing in a field"; a model that answers with a letter stops by itself."""

AT_ONCE = 2048
"""Requests handed to the engine together; their prompts stay in memory until all are answered."""


@dataclass(frozen=True)
class Condition:
    """What is shown and what is done inside the model while the samples are asked."""

    setting: Setting = "plain"
    steering: tuple[Steer, ...] = ()


@dataclass(frozen=True)
class Answers:
    """What one condition's samples were answered: for each the letters chosen unswapped and swapped, None = none."""

    letters: list[tuple[str | None, str | None]] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        """The category of every sample."""
        return [outcome(*pair) for pair in self.letters]

    def accuracy(self, toward: str = "vision") -> float:
        """Share of the questions (two a sample) that were answered with the vision (or the text) answer."""
        right = ("A", "B") if toward == "vision" else ("B", "A")
        hits = sum((first == right[0]) + (second == right[1]) for first, second in self.letters)
        return hits / (2 * len(self.letters)) if self.letters else 0.0


def ask(
    engine: Engine, samples: Sequence[Sample], conditions: Sequence[Condition], *, title: str = "", quiet: bool = False
) -> list[Answers]:
    """Ask every sample in both orders under every condition; one `Answers` a condition.

    Conditions that differ in steering only run beside each other in one batch. Answers are greedy.
    """
    plan = [(condition, sample, swapped) for sample in samples for condition in conditions for swapped in (False, True)]

    def requests(part: Sequence[Question]) -> Iterator[Request]:
        for condition, sample, swapped in part:
            bar.update()
            yield Request(
                messages=messages(sample, condition.setting, swapped),
                sampling=Sampling(max_tokens=MAX_TOKENS),
                steering=condition.steering,
            )

    chosen: list[str | None] = []
    with tqdm(total=len(plan), desc=title, unit=" prompts", disable=quiet or None, dynamic_ncols=True) as bar:
        for begin in range(0, len(plan), AT_ONCE):
            part = plan[begin : begin + AT_ONCE]
            results = engine.generate(requests(part))
            chosen += [
                letter(result.choices[0].text, sample.options(swapped))
                for result, (_, sample, swapped) in zip(results, part, strict=True)
            ]
    answers = [Answers() for _ in conditions]
    pairs = iter(zip(chosen[::2], chosen[1::2], strict=True))
    for _ in samples:
        for answer in answers:
            answer.letters.append(next(pairs))
    return answers
