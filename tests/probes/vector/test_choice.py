"""The cost of a calibration's points, and the choice among them, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from probes.conflicts.shares import Shares
from probes.vector.calibrate import Baseline, Budget, Point, choose

BUDGET = Budget(others=0.03, accuracy=0.03, kl=0.25, repetition=0.05)
BASELINE = Baseline(
    Shares(0.4, 0.5, 0.1, 4 / 9, 100), image_accuracy=0.95, context_accuracy=0.95, repetition=0.1, budget=BUDGET
)


def _shares(vision: float, text: float) -> Shares:
    return Shares(vision, text, round(1 - vision - text, 6), vision / (vision + text), 100)


def _point(
    layer: int,
    strength: float,
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    image: float = 0.95,
    context: float = 0.95,
    cross: float = 0.0,
    kl: float = 0.0,
    repetition: float = 0.1,
) -> Point:
    """`right` is the share of the steered modality on both sides, `wrong` that of the other."""
    return Point(layer, strength, _shares(right, wrong), _shares(wrong, right), image, context, cross, kl, repetition)


# ------------------------------------------------------------------------------------------------- what a point costs


def test_effect_is_that_of_the_weaker_way() -> None:
    point = Point(0, 1.0, _shares(0.8, 0.1), _shares(0.2, 0.6))
    assert point.effect == pytest.approx(0.4)
    assert replace(point, vision=_shares(0.3, 0.2)).effect == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("vision", "text", "reaches"),
    [
        (_shares(0.95, 0.05), _shares(0.05, 0.95), True),
        (_shares(0.94, 0.06), _shares(0.05, 0.95), False),
        (_shares(0.95, 0.05), _shares(0.06, 0.94), False),
        (_shares(0.5, 0.0), _shares(0.0, 0.5), True),
        (Shares(0.0, 0.0, 1.0, None, 100), _shares(0.0, 1.0), False),
        (_shares(1.0, 0.0), Shares(0.0, 0.0, 1.0, None, 100), False),
    ],
)
def test_targets_are_ratios_of_both_ways(vision: Shares, text: Shares, reaches: bool) -> None:
    assert Point(0, 1.0, vision, text).reaches is reaches


def test_damage_by_hand() -> None:
    point = Point(0, 1.0, _shares(0.70, 0.15), _shares(0.1, 0.78), 0.93, 0.90, 0.2, 0.4, 0.13)
    damage = BASELINE.damage(point)
    # Others are .15 toward vision and .12 toward text, .1 unsteered; the context lost .05, the image .02.
    assert (damage.others, damage.accuracy, damage.kl, damage.repetition) == pytest.approx((0.05, 0.05, 0.4, 0.03))
    better = BASELINE.damage(_point(0, 1.0, right=0.95, image=1.0, context=0.99, repetition=0.02))
    assert (better.others, better.accuracy, better.kl, better.repetition) == pytest.approx((-0.05, -0.04, 0.0, -0.08))


EXCEEDED = {
    "others": {"right": 0.86},
    "accuracy": {"image": 0.91},
    "kl": {"kl": 0.26},
    "repetition": {"repetition": 0.16},
}


@pytest.mark.parametrize(("part", "values"), [*EXCEEDED.items(), ("accuracy", {"context": 0.91})])
def test_each_part_of_the_budget_alone_rules_a_point_out(part: str, values: dict[str, float]) -> None:
    over = _point(2, 0.4, **values)
    weak = _point(2, 0.2, right=0.7, wrong=0.2)
    assert BASELINE.exceeded(over) == [part]
    assert not BASELINE.affords(over)
    assert choose([over, weak], BASELINE, [2]) is weak
    allowed = replace(BASELINE, budget=replace(BUDGET, **{part: 1.0}))
    assert allowed.exceeded(over) == []
    assert choose([over, weak], allowed, [2]) is over


@pytest.mark.parametrize(
    "values", [{"right": 0.87}, {"image": 0.92}, {"context": 0.92}, {"kl": 0.25}, {"repetition": 0.15}]
)
def test_what_spends_the_budget_to_its_end_is_afforded(values: dict[str, float]) -> None:
    assert BASELINE.affords(_point(2, 0.4, **values))
    assert 1.0 - 0.97 > 0.03  # which is rounding
    assert replace(BASELINE, image_accuracy=1.0).affords(_point(2, 0.4, image=0.97))


def test_all_that_is_exceeded_is_named() -> None:
    assert BASELINE.exceeded(_point(0, 1.0, right=0.5, image=0.5, kl=9.0, repetition=0.9)) == list(EXCEEDED)
    assert BASELINE.exceeded(_point(0, 1.0)) == []


def test_cost_adds_the_budgets_that_are_spent() -> None:
    point = _point(0, 1.0, right=0.885, image=0.89, kl=0.125, repetition=0.05, cross=0.03)
    # others .015 / .03, accuracy .06 / .03, KL .125 / .25, repetition better, the other modality .03 / .03
    assert BASELINE.cost(point) == pytest.approx(0.5 + 2 + 0.5 + 0 + 1)
    assert BASELINE.cost(replace(point, cross_fall=-0.5)) == pytest.approx(3.0)
    assert BASELINE.cost(replace(point, cross_fall=None)) == pytest.approx(3.0)


def test_a_budget_of_nothing_is_no_price() -> None:
    free = replace(BASELINE, budget=Budget(others=0.03, accuracy=0.0, kl=0.25, repetition=0.0))
    point = _point(0, 1.0, right=0.885, image=0.89, kl=0.125, repetition=0.2, cross=0.03)
    assert free.cost(point) == pytest.approx(0.5 + 0.5)
    assert free.exceeded(point) == ["accuracy", "repetition"]


# ------------------------------------------------------------------------------------------------------- the choice


def test_the_strongest_within_the_budget_is_chosen() -> None:
    strong_but_harmful = _point(2, 0.6, right=1.0, image=0.80)
    harmless = _point(3, 0.4, right=0.97, wrong=0.01)
    weak = _point(1, 0.2, right=0.85, wrong=0.10)
    assert choose([strong_but_harmful, harmless, weak], BASELINE, [2, 3, 1]) is harmless


def test_more_others_are_damage() -> None:
    confusing = _point(2, 0.6, right=0.85, wrong=0.0)  # others .15, plain .1: more than .03
    steady = _point(2, 0.3, right=0.90, wrong=0.02)
    assert choose([confusing, steady], BASELINE, [2]) is steady


def test_among_equals_the_least_damage_then_rank_then_strength_decides() -> None:
    damaging = _point(2, 0.4, cross=0.3)
    mild = _point(3, 0.4, cross=0.1)
    assert choose([damaging, mild], BASELINE, [2, 3]) is mild
    assert choose([_point(3, 0.2), _point(2, 0.4)], BASELINE, [2, 3]).layer == 2
    assert choose([_point(2, 0.4), _point(2, 0.2)], BASELINE, [2]).strength == 0.2


def test_a_little_stronger_is_not_worth_more_damage_but_much_stronger_is() -> None:
    # Of 100 samples two standard errors at .95 are 2 sqrt(.95 * .05 / 100) = .0436.
    strong = _point(2, 0.4, right=1.0, kl=0.25, cross=0.1)
    little, much = _point(2, 0.2, right=0.957), _point(2, 0.2, right=0.956)
    assert choose([strong, little], BASELINE, [2]) is little
    assert choose([strong, much], BASELINE, [2]) is strong
    many, few = (replace(BASELINE, plain=replace(BASELINE.plain, n=n)) for n in (400, 25))
    assert choose([strong, little], many, [2]) is strong
    assert choose([strong, much], few, [2]) is much


def test_without_any_point_in_the_budget_the_least_damaging_that_reaches_the_targets_is_chosen() -> None:
    points = [_point(1, 0.6, image=0.5), _point(1, 0.3, image=0.8), _point(1, 0.1, right=0.6, wrong=0.3, image=0.9)]
    assert choose(points, BASELINE, [1]) is points[1]


def test_without_any_point_that_reaches_the_targets_the_strongest_is_chosen() -> None:
    points = [_point(1, 0.6, right=0.7, wrong=0.1, image=0.5), _point(1, 0.3, right=0.5, wrong=0.4, image=0.9)]
    assert choose(points, BASELINE, [1]) is points[0]


def test_a_point_tells_all_its_numbers() -> None:
    told = _point(2, 0.4, right=0.9, wrong=0.05, kl=0.123456, cross=0.5).to_json()
    assert told == {
        "layer": 2, "dose": 0.4, "image_accuracy": 0.95, "context_accuracy": 0.95, "cross_fall": 0.5, "kl": 0.1235,
        "repetition": 0.1, "vision": _shares(0.9, 0.05).to_json(), "text": _shares(0.05, 0.9).to_json(),
    }  # fmt: skip
