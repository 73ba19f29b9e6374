"""Steering without being told the way (modality-preference paper, appendix E.5 and Table 12), and which modality the samples
of a task can be answered from.

Every sample is asked twice, with either modality degraded until nothing of it can be read; the other one is then reliable,
and its answer is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from probes.answering import Answerer, Push
from probes.asking import Answers, Condition, ask
from probes.bootstrap import interval
from probes.degrade import degraded
from probes.evaluate import Steering
from probes.mc2 import SIDES, Sample, Setting, Side, messages
from steering import Engine, measure

NUMBERS = ("identified", "decided", "plain", "prior", "auto")
"""What is measured on every sample."""


def _other(side: Side) -> Side:
    return "text" if side == "vision" else "vision"


@dataclass(frozen=True)
class Automatic:
    """One reliable side, all samples. Accuracies are shares of questions answered with that side's answer: plainly, steered
    there because the side is known (`prior`) and where "auto" found it (`auto`).

    `identified`: for every sample the share of its two questions for which the larger drop is that side's; `decided`: the
    share of them that "auto" decides and steers. `votes` by task: how often it decided for each side, how often for none.
    `reliable_alone`, `degraded_alone`: accuracy with one modality only, each for its own answer.
    """

    side: Side
    plain: np.ndarray
    prior: np.ndarray
    auto: np.ndarray
    identified: np.ndarray
    decided: np.ndarray
    right_if_decided: float
    votes: Mapping[str, Counter[str]]
    reliable_alone: float
    degraded_alone: float


@dataclass(frozen=True)
class AutomaticReport:
    """Both sides together."""

    sides: Mapping[Side, Automatic]

    @property
    def tasks_identified(self) -> float:
        """Share of the tasks (a kind of question with one reliable side) whose majority of decided votes is right."""
        right = [vote(votes) == one.side for one in self.sides.values() for votes in one.votes.values()]
        return sum(right) / len(right)

    def joined(self, name: str) -> np.ndarray:
        """A value a sample, both sides one after the other."""
        return np.concatenate([getattr(one, name) for one in self.sides.values()])

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "tasks_identified": self.tasks_identified,
            "auto_minus_prior": _mean(self.joined("auto") - self.joined("prior")),
        }
        for name in NUMBERS:
            report[name] = _mean(self.joined(name))
        report["sides"] = {
            side: {
                **{name: _mean(getattr(one, name)) for name in NUMBERS},
                "right_if_decided": one.right_if_decided,
                "reliable_alone": one.reliable_alone,
                "degraded_alone": one.degraded_alone,
                "votes": {task: dict(votes) for task, votes in one.votes.items()},
            }
            for side, one in self.sides.items()
        }
        return report


def _mean(values: np.ndarray) -> dict[str, Any]:
    return {"mean": float(values.mean()), "mean_95": list(interval(values))}


def vote(votes: Mapping[str, int]) -> Side | None:
    """The majority of the decided votes; vision where both are equal, as for one request, None where there are none."""
    vision, text = votes.get("vision", 0), votes.get("text", 0)
    if not vision + text:
        return None
    return "vision" if vision >= text else "text"


def automatic(
    answerer: Answerer,
    samples: Sequence[Sample],
    steering: Steering,
    *,
    severity: float = 1.0,
    seed: int = 0,
    quiet: bool = False,
) -> AutomaticReport:
    """Table 12 on both degraded copies of the samples."""
    return AutomaticReport(
        {side: _one_side(answerer, samples, steering, side, severity, seed, quiet) for side in SIDES}
    )


def _one_side(
    answerer: Answerer,
    samples: Sequence[Sample],
    steering: Steering,
    side: Side,
    severity: float,
    seed: int,
    quiet: bool,
) -> Automatic:
    copies = [degraded(sample, _other(side), severity, seed) for sample in samples]
    alone: dict[Side, Setting] = {"vision": "image_only", "text": "context_only"}
    conditions = [
        Condition(),
        Condition("plain", steering.toward(side)),
        Condition("plain", Push("auto", steering.vector, steering.strength, steering.layers)),
        Condition(alone[side]),
        Condition(alone[_other(side)]),
    ]
    plain, prior, auto, reliable, spoiled = ask(
        answerer, copies, conditions, title=f"Only {side} is reliable", quiet=quiet
    )
    found = [[reply.auto or {} for reply in pair] for pair in auto.replies]
    decided = np.array([[not one.get("undecided", False) for one in pair] for pair in found], float)
    identified = np.array([[one.get("toward") == side for one in pair] for pair in found], float)
    votes: dict[str, Counter[str]] = {task: Counter() for task in sorted({sample.task for sample in samples})}
    for sample, pair in zip(samples, found, strict=True):
        votes[sample.task].update("none" if one.get("undecided", False) else str(one.get("toward")) for one in pair)
    return Automatic(
        side,
        _right(plain, side),
        _right(prior, side),
        _right(auto, side),
        identified.mean(1),
        decided.mean(1),
        float((identified * decided).sum() / max(decided.sum(), 1)),
        votes,
        reliable.accuracy(side),
        spoiled.accuracy(_other(side)),
    )


def _right(answers: Answers, side: Side) -> np.ndarray:
    return np.array(answers.right(side))


@dataclass(frozen=True)
class TaskReliability:
    """Which modality a task's answers rest on: votes of single questions ("none" where the answer stands without either),
    and the mean drops of the answer's probability without the images and without the text context."""

    votes: Mapping[str, int]
    drop_vision: float
    drop_text: float

    @property
    def reliable(self) -> Side | None:
        return vote(self.votes)

    def to_json(self) -> dict[str, Any]:
        return {
            "reliable": self.reliable,
            "votes": dict(self.votes),
            "drop_vision": self.drop_vision,
            "drop_text": self.drop_text,
        }


def task_reliability(
    engine: Engine, samples: Sequence[Sample], *, batch: int = 64, quiet: bool = False
) -> dict[str, TaskReliability]:
    """The vote of every task, and under "all" that of the whole set; each sample is asked in both orders."""
    votes: dict[str, Counter[str]] = {}
    drops: dict[str, list[tuple[float, float]]] = {}
    with tqdm(total=2 * len(samples), desc="Reliability", unit=" prompts", disable=quiet or None) as bar:
        for begin in range(0, len(samples), batch):
            part = [(sample, swapped) for sample in samples[begin : begin + batch] for swapped in (False, True)]
            measured = measure(engine, [messages(sample, "plain", swapped) for sample, swapped in part])
            for (sample, _), one in zip(part, measured, strict=True):
                numbers = one.report()
                for task in (sample.task, "all"):
                    votes.setdefault(task, Counter()).update(["none" if one.undecided else one.toward])
                    drops.setdefault(task, []).append((numbers["drop_vision"], numbers["drop_text"]))
            bar.update(len(part))
    means = {task: np.array(pairs).mean(0).tolist() for task, pairs in drops.items()}
    return {task: TaskReliability(votes[task], *means[task]) for task in sorted(votes, key=lambda t: (t == "all", t))}
