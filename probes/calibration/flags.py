"""Thresholds of the flags: how often each is raised on right and on wrong answers, and whether it separates them.

The samples' questions are asked with their image alone and without options, on pictures from clean to barely readable, so
that the model gives both right and wrong answers. One half of the answers chooses the thresholds; the other half is
reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probes.answering.letters import letter
from probes.answering.progress import tracked
from probes.answering.requests import request
from probes.conflicts.degrade import degraded
from probes.conflicts.samples import ConflictSample
from probes.harness.bootstrap import area_with_interval, wilson
from steering import Diagnose, Engine, Sampling
from steering.model.thresholds import FLAGS, Thresholds

SEVERITIES = (0.0, 0.25, 0.5, 0.75)
"""The shares of noise in pictures (`probes.conflicts.degrade.noisy`)."""
RATE = 0.05
"""The highest rate at which a flag may be raised on the right answers that choose the thresholds."""
NUMBERS = ("attention", "activation", "agreement", "overlap")


@dataclass(frozen=True)
class Answered:
    """Answers, one value each: whether it is right, its task, its picture's severity, and the numbers of its maps."""

    right: np.ndarray
    task: np.ndarray
    severity: np.ndarray
    values: Mapping[str, np.ndarray]

    @property
    def alike(self) -> np.ndarray:
        """Names of the strata of equal task and severity."""
        return np.array([f"{task} {severity}" for task, severity in zip(self.task, self.severity, strict=True)])

    def part(self, chosen: np.ndarray) -> Answered:
        values = {name: column[chosen] for name, column in self.values.items()}
        return Answered(self.right[chosen], self.task[chosen], self.severity[chosen], values)

    def raised(self, thresholds: Thresholds) -> dict[str, np.ndarray]:
        """Return for each flag whether it is raised, 0 or 1: (answers,)."""
        rows = zip(*(self.values[name].tolist() for name in ("attention", "activation", "agreement")), strict=True)
        raised = [thresholds.flags(*row) for row in rows]
        return {flag: np.array([flags[flag] for flags in raised], float) for flag in FLAGS}


def ask(engine: Engine, samples: Sequence[ConflictSample], seed: int = 0, quiet: bool = False) -> Answered:
    """Ask every sample once, with a picture of a severity drawn from `SEVERITIES`.

    An answer is right if it names the option of the image and not the other one; an answer with maps that are zero or flat
    is left out. Raises ValueError if the answers are all right or all wrong.
    """
    severities = random.Random(f"severities {seed}").choices(SEVERITIES, k=len(samples))
    diagnose = Diagnose(frozenset({"flags"}))
    requests = (
        request(_chat(degraded(sample, "vision", severity, seed)), sampling=Sampling(max_tokens=40), diagnose=diagnose)
        for sample, severity in zip(
            tracked(samples, len(samples), "Flags", unit="samples", quiet=quiet), severities, strict=True
        )
    )
    rows = []
    for result, sample, severity in zip(engine.generate(requests), samples, severities, strict=True):
        choice = result.choices[0]
        numbers = ((choice.diagnostics or {}).get("flags") or {}).get("concentration", {})
        values = [numbers.get(name) for name in NUMBERS]
        if None not in values:
            rows.append((letter(choice.text, sample.options(False)) == "A", sample.task, severity, *values))
    right, task, severity_, *values = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else [np.zeros(0)] * 7
    )
    if right.all() or not right.any():
        raise ValueError(
            f"Of {len(rows)} answers {int(right.sum())} are right: flags need both right and wrong answers."
        )
    return Answered(right, task, severity_, dict(zip(NUMBERS, values, strict=True)))


def _chat(sample: ConflictSample) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": sample.picture()}, {"type": "text", "text": sample.question}]
    return [{"role": "user", "content": parts}]


def calibrate(answers: Answered) -> Thresholds:
    """Return thresholds from one half of the answers, with the rate at which they raise each flag on the other."""
    first, held_out = halves(answers)
    chosen = choose(first)
    return Thresholds(*chosen, answers=len(first.right), raised={
        flag: _rates(held_out, raised)
        for flag, raised in held_out.raised(Thresholds(*chosen, answers=0, raised={})).items()
    })  # fmt: skip


def halves(answers: Answered) -> tuple[Answered, Answered]:
    """Return the half that chooses the thresholds and the reported one, a random split that depends only on their number."""
    chosen = np.random.default_rng(0).permutation(len(answers.right)) < len(answers.right) // 2
    return answers.part(chosen), answers.part(~chosen)


def choose(answers: Answered) -> tuple[float, float, float]:
    """Return the thresholds of attention, activation and agreement.

    They are the greatest that raise either flag on at most a share of `RATE` of the right answers; attention and activation
    are the same quantile of the right answers' numbers.
    """
    right = {name: values[answers.right] for name, values in answers.values.items()}
    looked, activated, agreed = right["attention"], right["activation"], right["agreement"]

    def blind(share: float) -> np.ndarray:
        return (looked < np.quantile(looked, share)) & (activated < np.quantile(activated, share))

    share = _greatest(np.linspace(0, 1, 201), lambda share: blind(share).mean())
    attention, activation = float(np.quantile(looked, share)), float(np.quantile(activated, share))
    looks = looked >= attention
    agreement = _greatest(np.sort(agreed), lambda least: (looks & (agreed < least)).mean())
    return attention, activation, agreement


def _greatest(candidates: np.ndarray, rate: Callable[[float], float]) -> float:
    """Return the greatest of ascending candidates whose rate, which never falls, is at most `RATE`."""
    return float([value for value in candidates if rate(value) <= RATE][-1])


def _rates(answers: Answered, raised: np.ndarray) -> dict[str, Any]:
    """Return the flag's rates on right and on wrong answers, each [share, low, high].

    `area`, of the same form, is the share of pairs of a right and a wrong answer to alike questions in which the wrong one
    raises the flag (neither or both: half); `separates` tells whether that is above chance.
    """
    rates = {
        name: [float(some.mean()), *wilson(float(some.sum()), len(some))]
        for name, some in right_and_wrong(answers.right, raised)
        if len(some)
    }
    like = area_of(raised, answers, answers.alike)
    rounded = {
        name: [round(x, 4) for x in values] for name, values in (rates | ({"area": like} if like else {})).items()
    }
    return rounded | {"separates": like is not None and like[1] > 0.5}


def right_and_wrong(right: np.ndarray, raised: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Split flags into those of right and of wrong answers, with names."""
    return [("right", raised[right]), ("wrong", raised[~right])]


def area_of(values: np.ndarray, answers: Answered, strata: np.ndarray | None = None) -> list[float] | None:
    """Return the area of wrong answers against right ones with its interval; None if there is nothing to compare."""
    area = area_with_interval(values, ~answers.right, strata)
    return None if area is None else [area[0], *area[1]]
