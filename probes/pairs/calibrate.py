"""Find the layer and strength at which a vector from pairs moves answers both ways with little damage.

It is measured on questions whose answers show the side. As in the probe's calibration the chosen strength is folded into the
weight, so that strength 1.0 is a good default.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from probes.answering.base import Answerer, Push, Question
from probes.answering.engine import with_picture
from probes.answering.replies import replies
from probes.pairs.file import Check, Rule
from probes.vector.calibrate import noise, span
from probes.vector.neutral import repetition
from probes.vector.verdict import MOVED
from steering import MLLM, SteeringVector

MAX_TOKENS = 48
BUDGET = {"others": 0.03, "repetition": 0.05}
"""The damage that a strength may do: rise of the share of answers of neither side, and of the repetition in them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SideShares:
    """The shares of either side among `n` answers; the rest belong to neither."""

    n: int
    toward: float
    away: float
    repetition: float

    @property
    def others(self) -> float:
        return 1 - self.toward - self.away

    def to_json(self) -> dict[str, Any]:
        return {"n": self.n, "toward": self.toward, "away": self.away, "others": max(0.0, round(self.others, 6))}


@dataclass(frozen=True)
class SidePoint:
    """A layer and a strength, measured both ways."""

    layer: int
    strength: float
    toward: SideShares
    away: SideShares

    @property
    def effect(self) -> float:
        """The share of a side less that of the other one, the worse of both ways; at most 1."""
        return min(self.toward.toward - self.toward.away, self.away.away - self.away.toward)

    @property
    def moved(self) -> float:
        """The difference in either side's share between the two ways, the smaller of both; at most 1."""
        return min(self.toward.toward - self.away.toward, self.away.away - self.toward.away)

    def damage(self, plain: SideShares) -> dict[str, float]:
        """Return the part of each budget that the point spends."""
        both = (self.toward, self.away)
        return {
            "others": max(side.others for side in both) - plain.others,
            "repetition": max(side.repetition for side in both) - plain.repetition,
        }

    def affordable(self, plain: SideShares) -> bool:
        """Return whether the point stays within the budget."""
        return all(value <= BUDGET[name] + 1e-9 for name, value in self.damage(plain).items())

    def to_json(self) -> dict[str, Any]:
        """Return the point as the artifact stores it, where `dose` is the strength of the vector before calibration."""
        repeated = max(self.toward.repetition, self.away.repetition)
        return {
            "layer": self.layer, "dose": self.strength, "toward": self.toward.to_json(), "away": self.away.to_json(),
            "repetition": round(repeated, 4),
        }  # fmt: skip


def calibrate(
    mllm: MLLM,
    answerer: Answerer,
    vector: SteeringVector,
    tests: Sequence[Check],
    *,
    rule: Rule,
    strengths: Sequence[float],
    layers: Sequence[int] | None = None,
    quiet: bool = False,
) -> SteeringVector:
    """Return the vector with its layer and weight chosen by measurement, which `info["calibration"]` records.

    `tests` must not come from pairs that it was built from; `layers` are those to try (default: the first three of the
    vector's ranking). Raises ValueError without tests and for strengths that are not positive and finite.
    """
    if not tests:
        raise ValueError("A calibration needs at least one question.")
    if not strengths or any(not 0 < strength < math.inf for strength in strengths):
        raise ValueError(f"Strengths must be positive and finite, at least one; got {list(strengths)}.")
    tried = list(layers or vector.info["ranking"][:3])
    grid = [(layer, strength) for layer in tried for strength in sorted(set(strengths))]
    pushes = [Push(sign, vector, strength, (layer,)) for layer, strength in grid for sign in ("plus", "minus")]
    plain, *steered = _ask(mllm, answerer, tests, [None, *pushes], rule, quiet)
    pairs = zip(steered[::2], steered[1::2], strict=True)
    points = [SidePoint(*place, *both) for place, both in zip(grid, pairs, strict=True)]
    chosen = choose(points, plain, tried)
    curve = [point for point in points if point.layer == chosen.layer]
    within = chosen.affordable(plain)
    if not within:
        spent = ", ".join(
            f"{name} {value:.3f} (at most {BUDGET[name]:g})" for name, value in chosen.damage(plain).items()
        )
        _log.warning("Steering costs more than its budget: %s.", spent)
    calibration = {
        "layer": chosen.layer,
        "published_weight": float(vector.weight[chosen.layer]),
        "factor": chosen.strength,
        "default_strength": 1.0,
        "range": span(chosen.strength, {point.strength: point.affordable(plain) for point in curve}),
        "samples": len(tests),
        "score": rule,
        "targets_reached": chosen.moved >= MOVED - 1e-9,
        "within_budget": within,
        "budget": BUDGET,
        "baseline": {"plain": plain.to_json(), "repetition": round(plain.repetition, 4)},
        "chosen": chosen.to_json(),
        "curve": [point.to_json() | {"strength": round(point.strength / chosen.strength, 3)} for point in curve],
        "others_tried": [point.to_json() for point in points if point.layer != chosen.layer],
    }
    calibrated = {"calibration": calibration, "published": chosen.strength}
    return replace(
        vector, weight=vector.weight * chosen.strength, layers=(chosen.layer,), info=vector.info | calibrated
    )


def choose(points: Sequence[SidePoint], plain: SideShares, ranking: Sequence[int]) -> SidePoint:
    """Return the strongest of the points within the budget, or of all if none is.

    Among points that differ by noise only, the smallest strength wins, then the better ranked layer.
    """
    candidates = [point for point in points if point.affordable(plain)] or list(points)
    strongest = max(point.effect for point in candidates)
    alike = [point for point in candidates if point.effect >= strongest - noise(plain.n)]
    return min(alike, key=lambda point: (point.strength, ranking.index(point.layer)))


def unmoved(vector: SteeringVector, sides: tuple[str, str]) -> list[str]:
    """Return a sentence if a calibration shows that steering hardly moves the answers."""
    calibration = vector.info.get("calibration")
    if calibration is None or calibration["targets_reached"]:
        return []
    toward, away = calibration["chosen"]["toward"], calibration["chosen"]["away"]
    return [
        f"Steering hardly moves the answers: {toward['toward']:.3f} of them are {sides[0]!r} toward it and "
        f"{away['toward']:.3f} away from it, {toward['away']:.3f} and {away['away']:.3f} are {sides[1]!r} (differences of "
        f"at least {MOVED} wanted)."
    ]


def _ask(
    mllm: MLLM,
    answerer: Answerer,
    tests: Sequence[Check],
    pushes: Sequence[Push | None],
    rule: Rule,
    quiet: bool,
) -> list[SideShares]:
    """Return the shares under every push; the pushes of one question run beside each other in one batch."""
    questions = (
        Question(with_picture(mllm, chat), push, MAX_TOKENS, diagnose=None)
        for chat in (test.question.chat() for test in tests)
        for push in pushes
    )
    parts = ["plain" if push is None else f"steered {push.toward}" for _ in tests for push in pushes]
    texts = [reply.text for reply in replies(answerer, questions, parts, title="Calibrating", quiet=quiet)]
    shares = []
    for number in range(len(pushes)):
        answers = texts[number :: len(pushes)]
        sides = [test.side(text, rule) for test, text in zip(tests, answers, strict=True)]
        toward, away = (sides.count(side) / len(sides) for side in ("toward", "away"))
        shares.append(SideShares(len(sides), toward, away, fmean(map(repetition, answers))))
    return shares
