"""Find the layer and strength at which a vector steers both ways with little damage (modality-preference paper, 5.2).

The published weight gives the vector the mean magnitude of the states, which is too much for some models. Here layers and
strengths of the vector as built, which are in published units, are tried on samples that it was not built from, in two
passes: the effect of steering, then its cost where nothing conflicts. The chosen strength is folded into the weight, so that
strength 1.0 is a good default; `SteeringVector.published` keeps it in published units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from probes.answering.base import Answerer, Chat, Push
from probes.answering.engine import InProcess
from probes.conflicts.asking import Answers, Condition, ask
from probes.conflicts.samples import SIDES, ConflictSample
from probes.conflicts.shares import Shares
from probes.vector import neutral
from steering import Engine, Steer, SteeringVector

STRENGTHS = (0.15, 0.25, 0.3, 0.4, 0.5, 0.6, 1.0, 1.25, 1.5)
"""The strengths that are tried, in published units; the paper's best for Qwen2.5-VL-7B is 1.5."""

TARGET = 0.95
"""The target Vision Ratio toward vision, and 1 - it toward text; above the requirement, to allow for noise."""

NEUTRAL_SAMPLES = 32
"""The most images on which the neutral prompts are asked."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """The damage that a setting may do.

    It bounds the rise of the others' share; the fall of accuracy without a conflict (of the image alone steered toward
    either side, of the context alone steered toward text: see `Point`); the KL divergence (nats) from the unsteered
    next-token distribution on neutral prompts; and the rise of repetition there.
    """

    others: float = 0.03
    accuracy: float = 0.03
    kl: float = 0.25
    repetition: float = 0.05


@dataclass(frozen=True)
class Point:
    """A layer and a strength, measured both ways; `strength` is in units of the vector that is calibrated.

    `image_accuracy` is that of the image alone, steered toward either side, the lower of the two; `context_accuracy` that of
    the context alone, steered toward text. `cross_fall` is the accuracy that the context alone loses toward vision, where
    the favoured modality is missing. `kl` and `repetition` are those of neutral prompts, the greater of both ways. All are
    None until measured.
    """

    layer: int
    strength: float
    vision: Shares
    text: Shares
    image_accuracy: float | None = None
    context_accuracy: float | None = None
    cross_fall: float | None = None
    kl: float | None = None
    repetition: float | None = None

    @property
    def effect(self) -> float:
        """The share that follows the chosen side minus that of the other side, the worse of both ways; at most 1."""
        return min(1.0, self.vision.s_vision - self.vision.s_text, self.text.s_text - self.text.s_vision)

    @property
    def reaches(self) -> bool:
        """True if both directions reach their target."""
        up, down = self.vision.vision_ratio, self.text.vision_ratio
        return up is not None and down is not None and up >= TARGET and down <= 1 - TARGET

    def others_rise(self, plain: Shares) -> float:
        return max(self.vision.s_others, self.text.s_others) - plain.s_others

    def to_json(self) -> dict[str, Any]:
        """Return the point as the artifact stores it, with this strength as `dose` (`strength` is in calibrated units)."""
        fields = asdict(self) | {"vision": self.vision.to_json(), "text": self.text.to_json()}
        named = {"dose" if key == "strength" else key: value for key, value in fields.items()}
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in named.items()}


@dataclass(frozen=True)
class Baseline:
    """The unsteered model, with the budget.

    It holds shares on conflicts, accuracies with one modality alone, and repetition on neutral prompts.
    """

    plain: Shares
    image_accuracy: float
    context_accuracy: float
    repetition: float = 0.0
    budget: Budget = field(default_factory=Budget)

    def damage(self, point: Point) -> Budget:
        """Return the part of each budget that a measured point spends; below 0 if it does better than unsteered."""
        assert point.image_accuracy is not None
        assert point.context_accuracy is not None
        assert point.kl is not None
        assert point.repetition is not None
        fall = max(self.image_accuracy - point.image_accuracy, self.context_accuracy - point.context_accuracy)
        return Budget(point.others_rise(self.plain), fall, point.kl, point.repetition - self.repetition)

    def exceeded(self, point: Point) -> list[str]:
        """Return the parts of the budget that a measured point exceeds."""
        spent, allowed = asdict(self.damage(point)), asdict(self.budget)
        return [name for name, value in spent.items() if value > allowed[name] + 1e-9]

    def affords(self, point: Point) -> bool:
        """Return whether a measured point stays within the damage budget."""
        return not self.exceeded(point)

    def cost(self, point: Point) -> float:
        """Return the damage of a measured point in budgets that it spends; `cross_fall` is in budgets of accuracy."""
        spent, allowed = asdict(self.damage(point)), asdict(self.budget)
        shares = [max(0.0, value) / allowed[name] for name, value in spent.items() if allowed[name] > 0]
        cross = max(0.0, point.cross_fall or 0.0) / self.budget.accuracy if self.budget.accuracy > 0 else 0.0
        return sum(shares) + cross


def calibrate(
    engine: Engine,
    vector: SteeringVector,
    samples: Sequence[ConflictSample],
    *,
    layers: Sequence[int] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    budget: Budget | None = None,
    finalists: int = 5,
    answerer: Answerer | None = None,
    quiet: bool = False,
) -> SteeringVector:
    """Return the vector with its layer and weight chosen by measurement, which `info["calibration"]` records.

    `layers` are those to try (default: the first three of the vector's ranking); `samples` must not be those it was built
    from; `answerer` provides the engine's answers (one that keeps them, say). `strengths` are in units of the vector as
    given; as built they are published units. A result that misses the targets or the budget is logged, and marked in the
    calibration.
    """
    if not samples:
        raise ValueError("A calibration needs at least one sample.")
    if not strengths or any(not 0 < strength < math.inf for strength in strengths):
        raise ValueError(f"Strengths must be positive and finite, at least one; got {list(strengths)}.")
    sweep = _Sweep(engine, vector, samples, answerer or InProcess(engine), quiet)
    tried = list(layers or vector.info.get("ranking", vector.layers)[:3])
    baseline = sweep.baseline(budget or Budget())
    points = sweep.effects([(layer, strength) for layer in tried for strength in sorted(set(strengths))])
    best = sorted(points, key=lambda point: _preference(point, baseline, tried))[:finalists]
    measured = sweep.damage(best, baseline)
    layer = choose(measured, baseline, tried).layer
    # The range and the reader need the whole curve of that layer.
    places = {(point.layer, point.strength) for point in measured}
    unmeasured = [point for point in points if point.layer == layer and (layer, point.strength) not in places]
    curve = sorted(
        (point for point in [*measured, *sweep.damage(unmeasured, baseline)] if point.layer == layer),
        key=lambda point: point.strength,
    )
    chosen = choose(curve, baseline, tried)
    reached, exceeded = chosen.reaches, baseline.exceeded(chosen)
    if not reached:
        _log.warning(
            "Steering does not reach its targets: Vision Ratio %s toward vision (>= %.2f), %s toward text (<= %.2f).",
            chosen.vision.vision_ratio, TARGET, chosen.text.vision_ratio, 1 - TARGET,
        )  # fmt: skip
    if exceeded:
        spent, allowed = asdict(baseline.damage(chosen)), asdict(baseline.budget)
        _log.warning(
            "Steering costs more than its budget: %s.",
            ", ".join(f"{name} {spent[name]:.3f} (at most {allowed[name]:g})" for name in exceeded),
        )
    unit = vector.published
    calibration = {
        "layer": layer,
        "published_weight": float(vector.weight[layer]) / (unit or 1.0),
        "factor": chosen.strength * (unit or 1.0),
        "default_strength": 1.0,
        "range": span(chosen.strength, {point.strength: baseline.affords(point) for point in curve}),
        "samples": len(samples),
        "targets_reached": reached,
        "within_budget": not exceeded,
        "budget": asdict(baseline.budget),
        "baseline": {
            "plain": _with_interval(baseline.plain),
            "image_accuracy": baseline.image_accuracy,
            "context_accuracy": baseline.context_accuracy,
            "repetition": baseline.repetition,
        },
        "chosen": chosen.to_json() | {"vision": _with_interval(chosen.vision), "text": _with_interval(chosen.text)},
        "curve": [point.to_json() | {"strength": round(point.strength / chosen.strength, 3)} for point in curve],
        "others_tried": [point.to_json() for point in points if point.layer != layer],
    }
    return replace(
        vector,
        weight=vector.weight * chosen.strength,
        layers=(layer,),
        info=vector.info
        | {"calibration": calibration}
        | ({} if unit is None else {"published": chosen.strength * unit}),
    )


def _with_interval(shares: Shares) -> dict[str, Any]:
    """Return shares as JSON, with the 95 % interval of their Vision Ratio."""
    vision, text, others = (round(share * shares.n) for share in (shares.s_vision, shares.s_text, shares.s_others))
    intervals = Shares.of_counts(vision, text, others, intervals=True).intervals
    return shares.to_json() | (
        {"vision_ratio_95": list(intervals["vision_ratio"])} if "vision_ratio" in intervals else {}
    )


def choose(measured: Sequence[Point], baseline: Baseline, ranking: Sequence[int]) -> Point:
    """Return the strongest of the measured points within the budget, the least damaging if several differ by noise only.

    If none is within the budget, return the least damaging that reaches the targets; if none does, the strongest.
    """
    afforded = [point for point in measured if baseline.affords(point)]
    candidates = afforded or [point for point in measured if point.reaches] or list(measured)
    if afforded or not candidates[0].reaches:
        strongest = max(point.effect for point in candidates)
        candidates = [point for point in candidates if point.effect >= strongest - noise(baseline.plain.n)]
    return min(candidates, key=lambda point: (round(baseline.cost(point)), ranking.index(point.layer), point.strength))


def noise(samples: int) -> float:
    """Return two standard errors of a share of TARGET."""
    return 2 * math.sqrt(TARGET * (1 - TARGET) / samples)


@dataclass(frozen=True)
class _Sweep:
    """The measurements, each one pass over the samples with all its settings in one batch."""

    engine: Engine
    vector: SteeringVector
    samples: Sequence[ConflictSample]
    answerer: Answerer
    quiet: bool

    def baseline(self, budget: Budget) -> Baseline:
        conditions = [Condition(), Condition("image_only"), Condition("context_only")]
        plain, image, context = self._ask(conditions, "Baseline")
        (repetition,) = neutral.repetitions(self.answerer, self._neutral, [None], title="Neutral", quiet=self.quiet)
        return Baseline(
            Shares.of(plain.outcomes), image.accuracy("vision"), context.accuracy("text"), repetition, budget
        )

    def effects(self, grid: Sequence[tuple[int, float]]) -> list[Point]:
        """Measure the shares on conflicts at every point of the grid (the first pass)."""
        conditions = [Condition("plain", push) for layer, strength in grid for push in self._pushes(layer, strength)]
        shares = [Shares.of(answer.outcomes) for answer in self._ask(conditions, "Calibrating")]
        pairs = zip(shares[::2], shares[1::2], strict=True)
        return [Point(layer, strength, *pair) for (layer, strength), pair in zip(grid, pairs, strict=True)]

    def damage(self, points: Sequence[Point], baseline: Baseline) -> list[Point]:
        """Measure accuracies with one modality alone, and the change on neutral prompts (the second pass)."""
        if not points:
            return []
        conditions, pushes = [], []
        for point in points:
            vision, text = self._pushes(point.layer, point.strength)
            pushes += [vision, text]
            conditions += [Condition("image_only", vision), Condition("context_only", text)]
            conditions += [Condition("image_only", text), Condition("context_only", vision)]
        answers = self._ask(conditions, "Measuring damage")
        steers = [Steer.to(self.vector, push.toward, push.strength, layers=push.layers) for push in pushes]
        moved = neutral.shift(self.engine, self._neutral, steers, title="Neutral, next token", quiet=self.quiet)
        repeated = neutral.repetitions(self.answerer, self._neutral, pushes, title="Neutral, answers", quiet=self.quiet)
        return [
            replace(
                self._accuracies(point, baseline, answers[4 * i : 4 * i + 4]),
                kl=max(moved[2 * i : 2 * i + 2]),
                repetition=max(repeated[2 * i : 2 * i + 2]),
            )
            for i, point in enumerate(points)
        ]

    def _accuracies(self, point: Point, baseline: Baseline, answers: Sequence[Answers]) -> Point:
        image, context, image_cross, context_cross = answers
        return replace(
            point,
            image_accuracy=min(image.accuracy("vision"), image_cross.accuracy("vision")),
            context_accuracy=context.accuracy("text"),
            cross_fall=baseline.context_accuracy - context_cross.accuracy("text"),
        )

    @property
    def _neutral(self) -> list[Chat]:
        return neutral.chats(self.samples[:NEUTRAL_SAMPLES])

    def _pushes(self, layer: int, strength: float) -> list[Push]:
        return [Push(side, self.vector, strength, (layer,)) for side in SIDES]

    def _ask(self, conditions: Sequence[Condition], title: str) -> list[Answers]:
        return ask(self.answerer, self.samples, conditions, title=title, quiet=self.quiet)


def _preference(point: Point, baseline: Baseline, ranking: Sequence[int]) -> tuple[bool, bool, float, int, float]:
    """Return the sort key of the first pass: steering without confusion first, then low strengths and good ranks."""
    usable = point.others_rise(baseline.plain) <= baseline.budget.others + 1e-9
    if point.reaches and usable:
        return False, False, point.strength, ranking.index(point.layer), 0.0
    return True, not usable, -point.effect, ranking.index(point.layer), point.strength


def span(chosen: float, affordable: Mapping[float, bool]) -> list[float]:
    """Return the range of strengths around 1.0 (multiples of the chosen one) whose measured points are in budget."""
    within = {chosen}
    for side in (
        sorted(strength for strength in affordable if strength > chosen),
        sorted((strength for strength in affordable if strength < chosen), reverse=True),
    ):
        for strength in side:
            if not affordable[strength]:
                break
            within.add(strength)
    return [round(min(within) / chosen, 3), round(max(within) / chosen, 3)]
