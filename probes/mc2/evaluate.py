"""Modality preference on fresh conflicts (modality-preference paper, sections 4 and 5.3).

It measures the three shares by condition and task, checks with one modality alone, and controls. Random directions have the
vector's norm at each of its layers, so that they are the same dose; without them any large push that moves the shares would
look like steering.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from probes.answering.base import Answerer, Push
from probes.conflicts.asking import Answers, Condition, ask
from probes.conflicts.samples import SIDES, ConflictSample, Setting, Side, Wording
from probes.conflicts.shares import Shares
from probes.harness.bootstrap import interval, paired
from steering import SteeringVector

KINDS = ("plain", "instruct", "chain", "shots", "steer")
"""The kinds of condition: plain, the paper's instruction, that with a chain of thought, solved examples, steering."""
MORE_KINDS = ("both",)
"""The optional kinds of condition: the instruction and steering at once."""

RATIO, IMAGE_ONLY, CONTEXT_ONLY = "attention_ratio", "no_conflict_accuracy", "context_only_accuracy"
"""Names in report.json."""

STEERED = ("steer", "both")
"""The kinds that need a vector."""

_SETTINGS: dict[str, dict[Side, Setting]] = {
    "instruct": {"vision": "vision", "text": "text"},
    "chain": {"vision": "chain_vision", "text": "chain_text"},
    "shots": {"vision": "shots_vision", "text": "shots_text"},
    "both": {"vision": "vision", "text": "text"},
}


@dataclass(frozen=True)
class Candidate:
    """The evaluated vector, and how it is used; a strength of 1.0 is the vector's own, the calibrated one."""

    vector: SteeringVector
    strength: float = 1.0
    layers: tuple[int, ...] | None = None

    def toward(self, side: Side) -> Push:
        return Push(side, self.vector, self.strength, self.layers)


def named(kind: str, side: Side | None) -> str:
    """Return a condition's key in a report: plain, vision and text (steered), instruct_vision, ..."""
    if side is None:
        return kind
    return side if kind == "steer" else f"{kind}_{side}"


@dataclass(frozen=True)
class Preference:
    """The results of a condition, identified by `kind` and `side`.

    `followed` holds by side 1 for every sample that follows it, else 0. `attention_ratio` is the mean over the answers,
    `by_layer` the same in each layer with its 95 % interval over samples; `unanswered` the share of answers that choose no
    option; `image_only`, `context_only`: the share of right answers with one modality alone, if that was asked. `within`: by
    task, those of these numbers that are known.
    """

    kind: str
    side: Side | None
    shares: Shares
    by_task: Mapping[str, Shares]
    followed: Mapping[Side, np.ndarray]
    attention_ratio: float | None
    unanswered: float
    image_only: float | None = None
    context_only: float | None = None
    by_layer: Sequence[tuple[float, tuple[float, float]]] | None = None
    within: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        side: Side | None,
        samples: Sequence[ConflictSample],
        answers: Answers,
        alone: tuple[Answers, Answers] | None = None,
    ) -> Preference:
        """Compute the results from the answers to both modalities, and those to the image and to the context alone."""
        outcomes = answers.outcomes
        tasks = {
            task: [i for i, sample in enumerate(samples) if sample.task == task]
            for task in sorted({sample.task for sample in samples})
        }
        within = {task: _numbers(answers, alone, chosen) for task, chosen in tasks.items()}
        overall = _numbers(answers, alone, range(len(samples)))
        return cls(
            kind=kind,
            side=side,
            shares=Shares.of(outcomes, intervals=True),
            by_task={task: Shares.of([outcomes[i] for i in chosen], intervals=True) for task, chosen in tasks.items()},
            followed={side: np.array([outcome == side for outcome in outcomes], float) for side in SIDES},
            attention_ratio=overall.get(RATIO),
            unanswered=sum(letter is None for pair in answers.letters for letter in pair) / (2 * len(samples)),
            image_only=overall.get(IMAGE_ONLY),
            context_only=overall.get(CONTEXT_ONLY),
            by_layer=_layers(answers.attention_by_layer),
            within=within,
        )

    @property
    def name(self) -> str:
        """The condition's key in a report."""
        return named(self.kind, self.side)

    def to_json(self) -> dict[str, Any]:
        """Return the shares of all samples and by task; consistent = the same option in both orders."""
        more: dict[str, Any] = {
            "consistent": self.shares.s_vision + self.shares.s_text,
            "unanswered": self.unanswered,
            RATIO: self.attention_ratio,
            IMAGE_ONLY: self.image_only,
            CONTEXT_ONLY: self.context_only,
            "attention_by_layer": None if self.by_layer is None else [mean for mean, _ in self.by_layer],
            "attention_by_layer_95": None if self.by_layer is None else [list(bounds) for _, bounds in self.by_layer],
            "by_task": {
                task: {**shares.to_json(), **self.within.get(task, {})} for task, shares in self.by_task.items()
            },
        }
        return self.shares.to_json() | {name: value for name, value in more.items() if value is not None}


def _numbers(answers: Answers, alone: tuple[Answers, Answers] | None, chosen: Sequence[int]) -> dict[str, float]:
    """Return the known numbers, other than shares, of the chosen samples."""
    numbers = {RATIO: answers.of(chosen).attention_ratio}
    if alone is not None:
        image, context = (answers_alone.of(chosen) for answers_alone in alone)
        numbers |= {IMAGE_ONLY: image.accuracy("vision"), CONTEXT_ONLY: context.accuracy("text")}
    return {name: value for name, value in numbers.items() if value is not None}


def _layers(ratios: np.ndarray | None) -> list[tuple[float, tuple[float, float]]] | None:
    """Return mean and interval of each layer of (samples, layers); None if a layer was measured for no sample."""
    if ratios is None or np.isnan(ratios).all(0).any():
        return None
    defined = [column[~np.isnan(column)] for column in ratios.T]
    return [(float(column.mean()), interval(column)) for column in defined]


@dataclass(frozen=True)
class Advantage:
    """Steering's share toward a side less that of the best other condition, with its 95 % interval (the same samples)."""

    side: Side
    other: str
    difference: float
    interval: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {"other": self.other, "difference": self.difference, "difference_95": list(self.interval)}


@dataclass(frozen=True)
class Evaluation:
    """The results of `conditions` by name; `random`: the shares under each random direction."""

    conditions: dict[str, Preference]
    random: tuple[Shares, ...] = ()

    def advantages(self) -> list[Advantage]:
        """Compare steering with the best of the other conditions, toward each side; empty if either is missing."""
        advantages = []
        for side in SIDES:
            steered = self.conditions.get(side)
            rivals = [
                preference
                for preference in self.conditions.values()
                if preference.side == side and preference.kind not in STEERED
            ]
            if steered is None or not rivals:
                continue
            best = max(rivals, key=lambda preference: preference.shares.toward(side))
            difference = steered.followed[side] - best.followed[side]
            advantages.append(Advantage(side, best.name, float(difference.mean()), paired(difference)))
        return advantages

    def random_spread(self) -> dict[str, dict[str, float | None]]:
        """Return least, mean and greatest of each share under the random directions."""
        names = ("s_vision", "s_text", "s_others", "vision_ratio")
        return {name: spread([getattr(shares, name) for shares in self.random]) for name in names}

    def to_json(self) -> dict[str, Any]:
        """Return one object per condition; `random` and `advantages` only if they were measured."""
        report: dict[str, Any] = {name: measured.to_json() for name, measured in self.conditions.items()}
        if self.random:
            spreads = self.random_spread()
            report["random"] = {
                "directions": len(self.random),
                "vision_ratio": spreads["vision_ratio"],
                "s_others": spreads["s_others"],
                "each": [shares.to_json() for shares in self.random],
            }
        if advantages := self.advantages():
            report["advantages"] = {advantage.side: advantage.to_json() for advantage in advantages}
        return report


def evaluate(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    *,
    steering: Candidate | None = None,
    kinds: Iterable[str] = KINDS,
    shots: Sequence[ConflictSample] = (),
    wording: Wording = "paper",
    random_directions: int = 0,
    seed: int = 0,
    quiet: bool = False,
) -> Evaluation:
    """Ask the samples under the kinds of condition, toward both sides.

    `shots` are the solved examples, `wording` is that of the instructions. Raises ValueError for a kind that is unknown, or
    lacks its examples or its vector.
    """
    conditions = conditions_of(tuple(kinds), steering, tuple(shots), wording)
    alone: dict[tuple[str, Side | None], Condition] = {
        key: condition for key, condition in conditions.items() if condition.setting == "plain"
    }
    checks = [
        replace(condition, setting=setting)
        for condition in alone.values()
        for setting in ("image_only", "context_only")
    ]
    answers = ask(answerer, samples, [*conditions.values(), *checks], title="Conditions", quiet=quiet)
    image, context = answers[len(conditions) :: 2], answers[len(conditions) + 1 :: 2]
    checked = dict(zip(alone, zip(image, context, strict=True), strict=True))
    preferences = [
        Preference.of(*key, samples, answer, checked.get(key)) for key, answer in zip(conditions, answers, strict=False)
    ]
    return Evaluation(
        {preference.name: preference for preference in preferences},
        _random(answerer, samples, steering, random_directions, seed, quiet),
    )


def conditions_of(
    kinds: Sequence[str], steering: Candidate | None, shots: tuple[ConflictSample, ...], wording: Wording
) -> dict[tuple[str, Side | None], Condition]:
    """Return the conditions of the kinds, by kind and side.

    Raises ValueError for a kind that is unknown, or lacks its examples or its vector.
    """
    kinds_known = (*KINDS, *MORE_KINDS)
    if unknown := [kind for kind in kinds if kind not in kinds_known]:
        raise ValueError(f"Unknown conditions: {', '.join(unknown)}; there are {', '.join(kinds_known)}.")
    if "shots" in kinds and not shots:
        raise ValueError("The condition 'shots' needs solved examples, and there are no samples left for them.")
    conditions: dict[tuple[str, Side | None], Condition] = {}
    for kind in dict.fromkeys(kinds):
        if kind == "plain":
            conditions[kind, None] = Condition(report_key=named(kind, None))
        for side in SIDES if kind != "plain" else ():
            setting = _SETTINGS[kind][side] if kind in _SETTINGS else "plain"
            push = None
            if kind in STEERED:
                if steering is None:
                    raise ValueError(f"The condition '{kind}' needs a vector.")
                push = steering.toward(side)
            examples = shots if kind == "shots" else ()
            conditions[kind, side] = Condition(setting, push, examples, wording, named(kind, side))
    return conditions


def _random(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    steering: Candidate | None,
    count: int,
    seed: int,
    quiet: bool,
) -> tuple[Shares, ...]:
    if not count:
        return ()
    if steering is None:
        raise ValueError("Random directions need the vector whose size they have.")
    controls = [
        Condition("plain", replace(steering, vector=random_like(steering.vector, seed + i)).toward("text"))
        for i in range(count)
    ]
    pushed = ask(answerer, samples, controls, title="Random directions", quiet=quiet)
    return tuple(Shares.of(answer.outcomes) for answer in pushed)


def random_like(vector: SteeringVector, seed: int) -> SteeringVector:
    """Return a vector of random directions with the norms of w_l * v_l, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    push = vector.weight[:, None] * vector.direction
    noise = torch.randn(push.shape, generator=generator)
    noise *= push.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return replace(vector, name=f"random-{seed}", direction=noise, weight=torch.ones_like(vector.weight), info={})


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return least, mean and greatest of the values that exist."""
    defined = [value for value in values if value is not None]
    if not defined:
        return {"min": None, "mean": None, "max": None}
    return {"min": min(defined), "mean": statistics.fmean(defined), "max": max(defined)}
