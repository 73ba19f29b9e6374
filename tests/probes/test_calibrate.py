"""Which point a calibration chooses, by hand, and how the choice gets into the vector."""

from __future__ import annotations

import pytest
import torch

import steering
from probes.build import build
from probes.calibrate import Baseline, Point, calibrate, choose
from probes.mc2 import Shares
from tests.probes.conftest import make_samples

BASELINE = Baseline(Shares(0.4, 0.5, 0.1, 4 / 9, 100), image_accuracy=0.95, context_accuracy=0.95)


def _shares(vision: float, text: float) -> Shares:
    return Shares(vision, text, round(1 - vision - text, 6), vision / (vision + text), 100)


def _point(
    layer: int,
    dose: float,
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    image: float = 0.95,
    context: float = 0.95,
    cross: float = 0.0,
) -> Point:
    """`right` is the share of the steered modality on both sides, `wrong` that of the other."""
    return Point(layer, dose, _shares(right, wrong), _shares(wrong, right), image, context, cross)


def test_the_strongest_within_the_budget_is_chosen() -> None:
    strong_but_harmful = _point(2, 0.6, right=1.0, image=0.80)
    harmless = _point(3, 0.4, right=0.97, wrong=0.01)
    weak = _point(1, 0.2, right=0.85, wrong=0.10)
    assert choose([strong_but_harmful, harmless, weak], BASELINE, [2, 3, 1]) is harmless


def test_more_others_are_damage() -> None:
    confusing = _point(2, 0.6, right=0.85, wrong=0.0)  # others .15, plain .1: more than .03
    steady = _point(2, 0.3, right=0.90, wrong=0.02)
    assert choose([confusing, steady], BASELINE, [2]) is steady


def test_among_equals_the_least_damage_then_rank_then_dose_decides() -> None:
    damaging = _point(2, 0.4, cross=0.3)
    mild = _point(3, 0.4, cross=0.1)
    assert choose([damaging, mild], BASELINE, [2, 3]) is mild
    assert choose([_point(3, 0.2), _point(2, 0.4)], BASELINE, [2, 3]).layer == 2
    assert choose([_point(2, 0.4), _point(2, 0.2)], BASELINE, [2]).dose == 0.2


def test_without_any_point_in_the_budget_the_least_damaging_that_reaches_the_targets_is_chosen() -> None:
    points = [_point(1, 0.6, image=0.5), _point(1, 0.3, image=0.8), _point(1, 0.1, right=0.6, wrong=0.3, image=0.9)]
    assert choose(points, BASELINE, [1]) is points[1]


def test_without_any_point_that_reaches_the_targets_the_strongest_is_chosen() -> None:
    points = [_point(1, 0.6, right=0.7, wrong=0.1, image=0.5), _point(1, 0.3, right=0.5, wrong=0.4, image=0.9)]
    assert choose(points, BASELINE, [1]) is points[0]


def test_the_factor_is_folded_into_the_weight(tiny: steering.Engine) -> None:
    samples = make_samples(4)
    published = build(tiny, samples[:2], quiet=True)
    vector = calibrate(tiny, published, samples[2:], layers=[1], doses=[0.5], quiet=True)
    calibration = vector.info["calibration"]
    assert vector.layers == (1,)
    assert (calibration["layer"], calibration["factor"], calibration["range"]) == (1, 0.5, [1.0, 1.0])
    assert calibration["published_weight"] == pytest.approx(float(published.weight[1]))
    torch.testing.assert_close(vector.weight, 0.5 * published.weight)
    torch.testing.assert_close(vector.direction, published.direction)
    torch.testing.assert_close(vector.delta(1.0), published.delta(0.5, [1]))
    assert [(point["layer"], point["dose"]) for point in calibration["curve"]] == [(1, 0.5)]
    assert set(calibration["baseline"]["plain"]) == {"s_vision", "s_text", "s_others", "vision_ratio", "n"}
    assert steering.SteeringVector.from_bytes(vector.to_bytes()).info == vector.info


def test_a_random_model_misses_its_targets_and_says_so(tiny: steering.Engine, caplog: pytest.LogCaptureFixture) -> None:
    samples = make_samples(3)
    vector = calibrate(tiny, build(tiny, samples[:1], quiet=True), samples[1:], doses=[0.1], quiet=True)
    assert vector.info["calibration"]["targets_reached"] is False
    assert "does not reach its targets" in caplog.text


def test_no_samples_is_an_error(tiny: steering.Engine) -> None:
    vector = build(tiny, make_samples(1), quiet=True)
    with pytest.raises(ValueError, match="at least one sample"):
        calibrate(tiny, vector, [], quiet=True)
