"""The criterion that decides between the readings of See, and the conditions that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from probes.harness.comparison import BASELINE
from probes.harness.conditions import Wanted
from probes.readings.task import ALPHAS, PART, READINGS, conditions, judge
from steering import Options, Pai, See


def results(**accuracies: tuple[float, ...]) -> dict[str, Any]:
    made = {BASELINE: 0.798}
    for name, values in accuracies.items():
        made |= {f"{name}, {alpha:g}": value for alpha, value in zip(ALPHAS, values, strict=True)}
    return {name: {PART: {"all": {"accuracy": {"value": value}}}} for name, value in made.items()}


@pytest.mark.parametrize(
    ("accuracies", "accepted"),
    [
        ((0.83, 0.861, 0.85, 0.814), True),  # the paper's own figures
        ((0.861, 0.814, 0.8, 0.79), True),
        ((0.83, 0.861, 0.85, 0.84), False),  # falls by 2 points
        ((0.83, 0.861, 0.85, 0.79), False),  # by 7
        ((0.83, 0.85, 0.86, 0.82), False),  # twice 0.15 was not measured
        ((0.81, 0.82, 0.83, 0.84), False),
        ((0.78, 0.79, 0.76, 0.75), False),  # never above that without See
    ],
)
def test_a_reading_is_accepted_by_its_rise_and_fall(accuracies: tuple[float, ...], accepted: bool) -> None:
    assert judge(results(scale=accuracies))["scale"]["accepted"] is accepted


def test_a_reading_without_all_strengths_is_left_out() -> None:
    measured = results(scale=(0.83, 0.86, 0.85, 0.81))
    del measured["scale, 0.2"]
    assert judge(measured) == {}


def test_every_reading_has_every_strength_and_acts_alone() -> None:
    ways = conditions()
    assert len(ways) == len(READINGS) * len(ALPHAS)
    for name, (option,) in ways.items():
        assert isinstance(option, Options)
        alpha = option.amplify if isinstance(option, Pai) else option.alpha if isinstance(option, See) else None
        assert name.endswith(f", {alpha:g}")
    (pai,) = ways["a + alpha |a|, 0.1"]
    assert isinstance(pai, Pai)
    assert (pai.rule.weight, pai.rule.plausible) == (0, 0)  # no contrast


def test_there_are_no_other_conditions() -> None:
    Wanted(("scale*",), (), lambda: (), own=conditions(), only_own=True)
    with pytest.raises(ValueError, match="SAGE"):
        Wanted(("SAGE",), (), lambda: (), own=conditions(), only_own=True)
