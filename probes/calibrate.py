"""Find the layer and the dose at which a vector steers both ways and damages little (modality-preference paper, 5.2).

The published weight gives the vector the mean magnitude of the states, which is too much for some models. Here layers and
doses (shares of that weight) are tried on samples that the vector was not built from, in two passes: what steers, then
what that costs where nothing conflicts. The chosen dose is folded into the weight, so that strength 1.0 is a good default.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from probes.asking import Answers, Condition, ask
from probes.mc2 import Sample, Shares
from steering import Engine, Steer, SteeringVector

DOSES = (0.15, 0.25, 0.3, 0.4, 0.5, 0.6, 1.0)
"""Shares of the published weight that are tried."""

TARGET = 0.95
"""Vision Ratio to reach toward vision, and 1 - it toward text; above what is asked of a vector, for the split's noise."""

OTHERS_RISE = 0.03
ACCURACY_FALL = 0.03
"""The damage budget: how much the others' share may rise, and how much accuracy may fall without a conflict."""

EQUAL = 0.08
"""Effects (of at most 1) that differ by less are taken as equal, about two standard errors of a split of 50 samples; the
smaller damage then decides."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One layer and dose, measured both ways.

    `image_accuracy` is that of the image alone, steered toward either side, the lower of the two; `context_accuracy` that
    of the context alone, steered toward text. `cross_fall` is how much the context alone loses toward vision, where the
    modality that is asked for is missing. All None until measured.
    """

    layer: int
    dose: float
    vision: Shares
    text: Shares
    image_accuracy: float | None = None
    context_accuracy: float | None = None
    cross_fall: float | None = None

    @property
    def effect(self) -> float:
        """Vision Ratio toward vision minus that toward text, times the share of consistent answers; at most 1."""
        return min(1.0, self.vision.s_vision - self.vision.s_text, self.text.s_text - self.text.s_vision)

    @property
    def reaches(self) -> bool:
        """Whether both directions reach their target."""
        up, down = self.vision.vision_ratio, self.text.vision_ratio
        return up is not None and down is not None and up >= TARGET and down <= 1 - TARGET

    def others_rise(self, plain: Shares) -> float:
        return max(self.vision.s_others, self.text.s_others) - plain.s_others

    def to_json(self) -> dict[str, Any]:
        """The point as written into the artifact."""
        fields = asdict(self) | {"vision": self.vision.to_json(), "text": self.text.to_json()}
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}


@dataclass(frozen=True)
class Baseline:
    """The unsteered model: shares on conflicts, accuracies with one modality alone."""

    plain: Shares
    image_accuracy: float
    context_accuracy: float

    def fall(self, point: Point) -> float:
        """By how much the worse of a measured point's two accuracies lies below the unsteered model's."""
        assert point.image_accuracy is not None
        assert point.context_accuracy is not None
        return max(self.image_accuracy - point.image_accuracy, self.context_accuracy - point.context_accuracy)

    def affords(self, point: Point) -> bool:
        """Whether a measured point stays within the damage budget."""
        return point.others_rise(self.plain) <= OTHERS_RISE + 1e-9 and self.fall(point) <= ACCURACY_FALL + 1e-9


def calibrate(
    engine: Engine,
    vector: SteeringVector,
    samples: Sequence[Sample],
    *,
    layers: Sequence[int] | None = None,
    doses: Sequence[float] = DOSES,
    finalists: int = 5,
    quiet: bool = False,
) -> SteeringVector:
    """The vector with its layer and weight chosen by measurement, and `info["calibration"]` telling the measurement.

    `layers` are those to try (default: the first three of the vector's ranking); `samples` must not be those it was
    built from. What falls short of the targets or the budget is logged, and marked in the calibration.
    """
    if not samples:
        raise ValueError("A calibration needs at least one sample.")
    tried = list(layers or vector.info.get("ranking", vector.layers)[:3])
    plain, image, context = ask(
        engine,
        samples,
        [Condition(), Condition("image_only"), Condition("context_only")],
        title="Baseline",
        quiet=quiet,
    )
    baseline = Baseline(Shares.of(plain.outcomes), image.accuracy("vision"), context.accuracy("text"))
    points = _effects(engine, vector, samples, [(layer, dose) for layer in tried for dose in doses], quiet)
    best = sorted(points, key=lambda point: _preference(point, baseline.plain, tried))[:finalists]
    measured = _damage(engine, vector, samples, best, baseline, quiet)
    chosen = choose(measured, baseline, tried)
    reached, afforded = chosen.reaches, baseline.affords(chosen)
    if not reached:
        _log.warning(
            "Steering does not reach its targets: Vision Ratio %s toward vision (>= %.2f), %s toward text (<= %.2f).",
            chosen.vision.vision_ratio, TARGET, chosen.text.vision_ratio, 1 - TARGET,
        )  # fmt: skip
    if not afforded:
        _log.warning(
            "Steering costs more than its budget: others' share %+.3f (at most %.2f), accuracy without a conflict %+.3f "
            "(at least -%.2f).",
            chosen.others_rise(baseline.plain), OTHERS_RISE, -baseline.fall(chosen), ACCURACY_FALL,
        )  # fmt: skip
    known = {(point.layer, point.dose): point for point in [*points, *measured]}
    calibration = {
        "layer": chosen.layer,
        "published_weight": float(vector.weight[chosen.layer]),
        "factor": chosen.dose,
        "range": _range(chosen, known, baseline),
        "samples": len(samples),
        "targets_reached": reached,
        "within_budget": afforded,
        "baseline": {
            "plain": baseline.plain.to_json(),
            "image_accuracy": baseline.image_accuracy,
            "context_accuracy": baseline.context_accuracy,
        },
        "chosen": chosen.to_json(),
        "curve": [point.to_json() for point in known.values()],
    }
    return replace(
        vector,
        weight=vector.weight * chosen.dose,
        layers=(chosen.layer,),
        info=vector.info | {"calibration": calibration},
    )


def choose(measured: Sequence[Point], baseline: Baseline, ranking: Sequence[int]) -> Point:
    """The strongest of the measured points within the budget; among equally strong ones the least damaging.

    Where none is within the budget, one that reaches the targets, with the least damage; where none does, the strongest.
    """
    afforded = [point for point in measured if baseline.affords(point)]
    candidates = afforded or [point for point in measured if point.reaches] or list(measured)
    if afforded or not candidates[0].reaches:
        strongest = max(point.effect for point in candidates)
        candidates = [point for point in candidates if point.effect >= strongest - EQUAL]

    def damage(point: Point) -> tuple[float, int, float]:
        fall = max(0.0, baseline.fall(point)) + max(0.0, point.cross_fall or 0.0)
        return round(fall + max(0.0, point.others_rise(baseline.plain)), 2), ranking.index(point.layer), point.dose

    return min(candidates, key=damage)


def _steers(vector: SteeringVector, layer: int, dose: float) -> tuple[tuple[Steer, ...], tuple[Steer, ...]]:
    """The interventions toward vision and toward text."""
    vision, text = (Steer.to(vector, toward, dose, layers=(layer,)) for toward in ("vision", "text"))
    return (vision,), (text,)


def _effects(
    engine: Engine, vector: SteeringVector, samples: Sequence[Sample], grid: Sequence[tuple[int, float]], quiet: bool
) -> list[Point]:
    """First pass: the shares on conflicts at every point of the grid."""
    conditions = [Condition("plain", steer) for layer, dose in grid for steer in _steers(vector, layer, dose)]
    answers = ask(engine, samples, conditions, title="Calibrating", quiet=quiet)
    shares = [Shares.of(answer.outcomes) for answer in answers]
    pairs = zip(shares[::2], shares[1::2], strict=True)
    return [Point(layer, dose, *pair) for (layer, dose), pair in zip(grid, pairs, strict=True)]


def _damage(
    engine: Engine,
    vector: SteeringVector,
    samples: Sequence[Sample],
    points: Sequence[Point],
    baseline: Baseline,
    quiet: bool,
) -> list[Point]:
    """Second pass: the accuracies with one modality alone at the points that steer best."""
    conditions = []
    for point in points:
        toward_vision, toward_text = _steers(vector, point.layer, point.dose)
        conditions += [Condition("image_only", toward_vision), Condition("context_only", toward_text)]
        conditions += [Condition("image_only", toward_text), Condition("context_only", toward_vision)]
    answers = ask(engine, samples, conditions, title="Measuring damage", quiet=quiet)

    def measured(point: Point, four: Sequence[Answers]) -> Point:
        image, context, image_cross, context_cross = (
            answer.accuracy(toward) for answer, toward in zip(four, ("vision", "text", "vision", "text"), strict=True)
        )
        cross = baseline.context_accuracy - context_cross
        return replace(point, image_accuracy=min(image, image_cross), context_accuracy=context, cross_fall=cross)

    return [measured(point, answers[4 * i : 4 * i + 4]) for i, point in enumerate(points)]


def _preference(point: Point, plain: Shares, ranking: Sequence[int]) -> tuple[bool, bool, float, int, float]:
    """Sort key of the first pass: points that steer without confusing, the small doses of well ranked layers first."""
    usable = point.others_rise(plain) <= OTHERS_RISE + 1e-9
    if point.reaches and usable:
        return False, False, point.dose, ranking.index(point.layer), 0.0
    return True, not usable, -point.effect, ranking.index(point.layer), point.dose


def _range(chosen: Point, known: dict[tuple[int, float], Point], baseline: Baseline) -> list[float]:
    """The strengths around 1.0 (multiples of the chosen dose) at which the others' share stays within its budget."""
    doses = sorted(dose for layer, dose in known if layer == chosen.layer)
    low = high = chosen.dose
    for dose in reversed([dose for dose in doses if dose < chosen.dose]):
        if known[chosen.layer, dose].others_rise(baseline.plain) > OTHERS_RISE:
            break
        low = dose
    for dose in (dose for dose in doses if dose > chosen.dose):
        if known[chosen.layer, dose].others_rise(baseline.plain) > OTHERS_RISE:
            break
        high = dose
    return [round(low / chosen.dose, 3), round(high / chosen.dose, 3)]
