"""Steering with an automatic direction (modality-preference paper, appendix E.5 and Table 12), and its votes by task.

Every sample is asked twice, with either modality degraded; the other one is then reliable, and its answer is right. A
criterion is rated by the share of the gap that it closes between the plain model and one that is steered rightly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from probes.answering.base import Answerer, Push
from probes.conflicts.asking import Answers, Condition, ask
from probes.conflicts.degrade import degraded, reworded
from probes.conflicts.samples import ConflictSample, Setting, Side
from probes.harness.bootstrap import gap_closed
from probes.mc2.evaluate import Candidate
from probes.vector.reliability import vote
from steering import Criterion

SEVERITIES = (0.3, 0.5, 0.7)
"""The severities of the degradation, from little to one that leaves something to read."""

CRITERIA: Mapping[str, Criterion] = {
    "drop": Criterion(),
    "surprise": Criterion("surprise"),
    "surprise, one degraded": Criterion("surprise", one_degraded=True),
}
"""The criteria that are compared, by their names in the report."""


def _other(side: Side) -> Side:
    return "text" if side == "vision" else "vision"


@dataclass(frozen=True)
class Ways:
    """The decisions of a criterion.

    right: for every sample the share of its two questions that were answered rightly. toward: the sides chosen for them,
    None for an abstention.
    """

    right: np.ndarray
    toward: tuple[tuple[Side | None, ...], ...]


@dataclass(frozen=True)
class Cell:
    """All samples with one modality degraded, so that the other `side` is right.

    `reworded`: the sound text is in an unfamiliar wording. plain, prior: as `Ways.right`, without steering and steered to
    the known right side. followed: the side of every plain answer, None if it has none. reliable_alone, degraded_alone:
    accuracy with one modality only, each for its own answer.
    """

    side: Side
    severity: float
    reworded: bool
    plain: np.ndarray
    prior: np.ndarray
    followed: tuple[tuple[Side | None, ...], ...]
    ways: Mapping[str, Ways]
    reliable_alone: float
    degraded_alone: float


@dataclass(frozen=True)
class Worth:
    """The results of a criterion over some cells.

    Shares of all questions: `plain`, `prior` and `auto` answered rightly; `decided`; steered `toward_vision`. Shares of the
    decided ones: `right_if_decided`, and `follows`, which point to the side of the plain answer. `gap_closed`: (auto -
    plain) / (prior - plain) with its 95 % interval over samples, None if there is no gap. `tasks`: share of the tasks (of
    one side each) whose majority of decided votes is right.
    """

    plain: float
    prior: float
    auto: float
    gap_closed: tuple[float, tuple[float, float]] | None
    decided: float
    toward_vision: float
    right_if_decided: float | None
    follows: float | None
    tasks: float

    def to_json(self) -> dict[str, Any]:
        closed, low_high = (None, None) if self.gap_closed is None else self.gap_closed
        return asdict(self) | {"gap_closed": closed, "gap_closed_95": None if low_high is None else list(low_high)}


@dataclass(frozen=True)
class AutomaticReport:
    """The results of all cells; `tasks` are those of the samples, in their order."""

    cells: Sequence[Cell]
    tasks: Sequence[str]

    @property
    def criteria(self) -> tuple[str, ...]:
        return tuple(self.cells[0].ways)

    @property
    def severities(self) -> list[float]:
        return sorted({cell.severity for cell in self.cells})

    def groups(self, severity: float | None = None) -> dict[str, list[Cell]]:
        """Return the cells that are reported together, of one severity or, with None, of all."""
        cells = [cell for cell in self.cells if severity is None or cell.severity == severity]
        image = [cell for cell in cells if cell.side == "text" and not cell.reworded]
        text = [cell for cell in cells if cell.side == "vision"]
        unfamiliar = [cell for cell in cells if cell.reworded]
        return {
            "either": image + text,
            "image": image,
            "text": text,
            "image, unfamiliar text": unfamiliar,
            "either, unfamiliar text": unfamiliar + text,
        }

    def row(self, cells: Sequence[Cell], criterion: str) -> Worth:
        plain, prior, auto = (
            np.mean(values, 0)
            for values in (
                [cell.plain for cell in cells],
                [cell.prior for cell in cells],
                [cell.ways[criterion].right for cell in cells],
            )
        )
        votes = [
            (cell.side, way, followed)
            for cell in cells
            for ways, sides in zip(cell.ways[criterion].toward, cell.followed, strict=True)
            for way, followed in zip(ways, sides, strict=True)
        ]
        decided = [vote for vote in votes if vote[1] is not None]
        majorities = [
            vote(self.votes(cell, criterion)[task]) == cell.side for cell in cells for task in sorted(set(self.tasks))
        ]
        return Worth(
            float(plain.mean()),
            float(prior.mean()),
            float(auto.mean()),
            gap_closed(plain, prior, auto),
            len(decided) / len(votes),
            sum(way == "vision" for _, way, _ in votes) / len(votes),
            _share(way == side for side, way, _ in decided),
            _share(way == followed for _, way, followed in decided),
            sum(majorities) / len(majorities),
        )

    def votes(self, cell: Cell, criterion: str) -> dict[str, Counter[str]]:
        """Return by task how often the criterion decided for each side, and how often for none."""
        votes: dict[str, Counter[str]] = {task: Counter() for task in sorted(set(self.tasks))}
        for task, ways in zip(self.tasks, cell.ways[criterion].toward, strict=True):
            votes[task].update(way or "none" for way in ways)
        return votes

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"severity": severity, "degraded": group, "criterion": criterion, **self.row(cells, criterion).to_json()}
            for severity in (None, *self.severities)
            for group, cells in self.groups(severity).items()
            for criterion in self.criteria
        ]
        checks = [
            {
                "side": cell.side,
                "severity": cell.severity,
                "reworded": cell.reworded,
                "reliable_alone": cell.reliable_alone,
                "degraded_alone": cell.degraded_alone,
                "votes": {
                    name: {task: dict(of) for task, of in self.votes(cell, name).items()} for name in self.criteria
                },
            }
            for cell in self.cells
        ]
        return {"severities": self.severities, "criteria": list(self.criteria), "rows": rows, "cells": checks}


def _share(of: Iterable[bool]) -> float | None:
    """Return the share of True; None if there are no values."""
    values = list(of)
    return sum(values) / len(values) if values else None


def automatic(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    steering: Candidate,
    *,
    criteria: Mapping[str, Criterion] = CRITERIA,
    severities: Sequence[float] = SEVERITIES,
    seed: int = 0,
    quiet: bool = False,
) -> AutomaticReport:
    """Return Table 12 on degraded copies of the samples, with either modality degraded at every severity.

    The image is also degraded beside sound texts in an unfamiliar wording.
    """
    kinds: tuple[tuple[Side, bool], ...] = (("vision", False), ("text", False), ("text", True))
    cells = [
        _cell(answerer, samples, steering, criteria, side, severity, unfamiliar, seed, quiet)
        for severity in severities
        for side, unfamiliar in kinds
    ]
    return AutomaticReport(cells, [sample.task for sample in samples])


def _cell(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    steering: Candidate,
    criteria: Mapping[str, Criterion],
    side: Side,
    severity: float,
    unfamiliar: bool,
    seed: int,
    quiet: bool,
) -> Cell:
    copies = [degraded(sample, _other(side), severity, seed) for sample in samples]
    if unfamiliar:
        copies = [reworded(copy, seed) for copy in copies]
    alone: dict[Side, Setting] = {"vision": "image_only", "text": "context_only"}
    conditions = [
        Condition(),
        Condition("plain", steering.toward(side)),
        Condition(alone[side]),
        Condition(alone[_other(side)]),
        *(
            Condition("plain", Push("auto", steering.vector, steering.strength, steering.layers, criterion))
            for criterion in criteria.values()
        ),
    ]
    title = f"Only {side} is sound, severity {severity:g}{', unfamiliar text' if unfamiliar else ''}"
    plain, prior, reliable, spoiled, *autos = ask(answerer, copies, conditions, title=title, quiet=quiet)
    return Cell(
        side,
        severity,
        unfamiliar,
        np.array(plain.right(side)),
        np.array(prior.right(side)),
        tuple(plain.sides),
        {
            name: Ways(np.array(auto_answers.right(side)), _toward(auto_answers))
            for name, auto_answers in zip(criteria, autos, strict=True)
        },
        reliable.accuracy(side),
        spoiled.accuracy(_other(side)),
    )


def _toward(answers: Answers) -> tuple[tuple[Side | None, ...], ...]:
    return tuple(tuple((reply.auto or {}).get("toward") for reply in pair) for pair in answers.replies)
