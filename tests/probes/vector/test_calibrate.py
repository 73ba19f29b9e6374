"""Which point a calibration chooses, by hand; what it measures, on a model whose answers are scripted; how it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from probes.answering.base import Chat, Question
from probes.answering.engine import InProcess
from probes.conflicts.samples import ConflictSample
from probes.conflicts.shares import Shares
from probes.vector import neutral
from probes.vector.build import build
from probes.vector.calibrate import Baseline, Budget, Point, calibrate, choose
from steering import Steer, SteeringVector
from tests.probes.conftest import Scripted, make_samples, text_of

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


# ------------------------------------------------------------------------------------- a model whose answers are known


SAMPLES = 10
STRENGTHS = (0.2, 0.3, 0.4, 0.6, 1.0)
KL = {0.2: 0.05, 0.3: 0.1, 0.4: 0.2, 0.6: 0.3, 1.0: 0.1}
ONCE = "the ball lies on the grass and nothing else is there"


def _scripted(samples: Sequence[ConflictSample]) -> Scripted:
    """Plainly four of ten follow the image, one neither. Layer 1 steers from 0.3 on, at 0.2 only every other sample;
    layer 0 does nothing. With one modality alone all answers are right up to 0.4; at 0.6 the image alone loses a
    fifth toward text, the context alone a tenth toward text and half toward vision. At 1.0 neutral answers repeat
    themselves."""
    numbers = {sample.context: int(sample.id) for sample in samples}

    def answer(question: Question) -> str:
        text, push = text_of(question), question.push
        strength = 0.0 if push is None or push.layers != (1,) else push.strength
        toward = None if push is None else push.toward
        if "\nA. " not in text:
            return f"{ONCE} " + "so it is so it is so it is" * (strength >= 1.0)
        pictures = any(part["type"] == "image" for part in question.chat[0]["content"])
        if "Text context:" not in text:
            # the samples are told apart by their pictures, which are shades of red
            picture = next(part["image"] for part in question.chat[0]["content"] if part["type"] == "image")
            number = picture.getpixel((0, 0))[0] // 20
            lost = strength >= 0.6 and toward == "text" and number < 2
            return "blue" if lost else "red"
        number = next(number for context, number in numbers.items() if context in text)
        if not pictures:
            lost = strength >= 0.6 and number < {"text": 1, "vision": 5}.get(str(toward), 0)
            return "red" if lost else "blue"
        if strength >= 0.3 or (strength == 0.2 and number % 2):
            return {"vision": "red", "text": "blue"}[str(toward)]
        return "neither" if number == 4 else "red" if number < 4 else "blue"

    return Scripted(answer)


@pytest.fixture
def samples() -> list[ConflictSample]:
    return [replace(one, image=Image.new("RGB", (8, 8), (20 * i, 0, 0))) for i, one in enumerate(make_samples(SAMPLES))]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Steer]:
    """The next-token shifts are scripted too, greater toward text; the steers they were asked for."""
    asked: list[Steer] = []

    def shift(engine: Any, chats: Sequence[Chat], steers: Sequence[Steer], **options: Any) -> list[float]:
        assert chats
        asked.extend(steers)
        return [KL[abs(steer.scale)] / (2 if steer.toward == "vision" else 1) for steer in steers]

    monkeypatch.setattr(neutral, "shift", shift)
    return asked


@pytest.fixture
def published(vector: SteeringVector) -> SteeringVector:
    return replace(vector, info=vector.info | {"ranking": [1, 0, 2]})


@pytest.mark.usefixtures("moved")
def test_a_scripted_model_is_measured_as_it_is(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    vector = calibrate(
        tiny,
        published,
        samples,
        layers=[0, 1],
        strengths=STRENGTHS,
        finalists=2,
        answerer=_scripted(samples),
        quiet=True,
    )
    found = vector.info["calibration"]
    assert found["baseline"] == {
        "plain": {"s_vision": 0.4, "s_text": 0.5, "s_others": 0.1, "vision_ratio": pytest.approx(4 / 9), "n": 10},
        "image_accuracy": 1.0, "context_accuracy": 1.0, "repetition": 0.0,
    }  # fmt: skip
    assert (found["layer"], found["factor"], found["default_strength"], found["samples"]) == (1, 0.3, 1.0, SAMPLES)
    assert (found["targets_reached"], found["within_budget"]) == (True, True)
    assert found["budget"] == {"others": 0.03, "accuracy": 0.03, "kl": 0.25, "repetition": 0.05}
    assert vector.layers == (1,)
    torch.testing.assert_close(vector.weight, 0.3 * published.weight)


@pytest.mark.usefixtures("moved")
def test_the_whole_curve_of_the_chosen_layer_is_measured(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    vector = calibrate(
        tiny,
        published,
        samples,
        layers=[0, 1],
        strengths=STRENGTHS,
        finalists=1,
        answerer=_scripted(samples),
        quiet=True,
    )
    found = vector.info["calibration"]
    curve = {point["dose"]: point for point in found["curve"]}
    assert list(curve) == list(STRENGTHS)
    assert all(point["layer"] == 1 for point in found["curve"])
    assert [point["strength"] for point in found["curve"]] == [0.667, 1.0, 1.333, 2.0, 3.333]
    assert {
        strength: point["kl"] for strength, point in curve.items()
    } == KL  # the greater of both ways, which is toward text
    assert [point["image_accuracy"] for point in found["curve"]] == [1, 1, 1, 0.8, 0.8]
    assert [point["context_accuracy"] for point in found["curve"]] == [1, 1, 1, 0.9, 0.9]
    assert [point["cross_fall"] for point in found["curve"]] == pytest.approx([0, 0, 0, 0.5, 0.5])
    neutral_answer = neutral.repetition(f"{ONCE} so it is so it is so it is")
    assert [point["repetition"] for point in found["curve"]] == pytest.approx([0, 0, 0, 0, neutral_answer], abs=1e-4)
    assert neutral_answer > 0.05
    # At 0.2 the odd samples follow: 1 3 5 7 9 beside 0 2 toward vision, beside 6 8 toward text; sample 4 is neither.
    assert (curve[0.2]["vision"]["s_vision"], curve[0.2]["vision"]["s_others"]) == (0.7, 0.1)
    assert (curve[0.2]["text"]["s_text"], curve[0.2]["text"]["s_vision"]) == (0.7, 0.2)
    assert curve[0.3]["vision"]["s_vision"] == curve[0.3]["text"]["s_text"] == 1.0
    assert found["chosen"] == {key: value for key, value in curve[0.3].items() if key != "strength"}
    assert [(point["layer"], point["dose"]) for point in found["others_tried"]] == [
        (0, strength) for strength in STRENGTHS
    ]
    assert found["others_tried"][-1]["text"]["s_text"] == 0.5


def test_shifts_are_asked_for_both_ways_of_the_same_doses(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], moved: list[Steer]
) -> None:
    calibrate(tiny, published, samples, layers=[1], strengths=[0.4, 0.2], answerer=_scripted(samples), quiet=True)
    assert sorted((steer.scale, steer.layers) for steer in moved) == [
        (-0.4, (1,)), (-0.2, (1,)), (0.2, (1,)), (0.4, (1,)),
    ]  # fmt: skip
    assert all(steer.vector is published for steer in moved)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([0.1, 0.1, 0.1, 0.1, 0.1], [0.333, 1.667]),
        ([0.1, 0.1, 0.1, 0.3, 0.1], [0.333, 1.0]),
        ([0.1, 0.1, 0.1, 0.1, 0.3], [0.333, 1.333]),
        ([0.1, 0.3, 0.1, 0.1, 0.1], [1.0, 1.667]),
        ([0.3, 0.1, 0.1, 0.1, 0.1], [0.667, 1.667]),
        ([0.1, 0.3, 0.1, 0.3, 0.1], [1.0, 1.0]),
    ],
)
@pytest.mark.usefixtures("moved")
def test_the_range_ends_before_the_first_strength_that_costs_too_much(
    tiny: steering.Engine,
    published: SteeringVector,
    samples: list[ConflictSample],
    kl: list[float],
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strengths = [0.1, 0.2, 0.3, 0.4, 0.5]
    for strength, value in zip(strengths, kl, strict=True):
        monkeypatch.setitem(KL, strength, value)
    vector = calibrate(
        tiny, published, samples, layers=[1], strengths=strengths, answerer=_scripted(samples), quiet=True
    )
    assert vector.info["calibration"]["factor"] == 0.3
    assert vector.info["calibration"]["range"] == expected
    assert vector.calibrated_range == tuple(expected)
    assert Steer.to(vector, "text", expected[1]).warning is None
    assert Steer.to(vector, "text", expected[1] + 0.1).warning is not None


@pytest.mark.usefixtures("moved")
def test_a_strength_of_the_same_layer_that_is_no_finalist_may_still_be_chosen(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KL, 0.3, 0.3)
    vector = calibrate(
        tiny, published, samples, layers=[1], strengths=STRENGTHS, finalists=1, answerer=_scripted(samples), quiet=True
    )
    assert vector.info["calibration"]["factor"] == 0.4
    assert vector.info["calibration"]["within_budget"] is True


@pytest.mark.usefixtures("moved")
def test_a_wider_budget_gives_a_wider_range(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    wide = Budget(others=1.0, accuracy=1.0, kl=9.0, repetition=1.0)
    vector = calibrate(
        tiny, published, samples, layers=[1], strengths=STRENGTHS, budget=wide, answerer=_scripted(samples), quiet=True
    )
    assert vector.calibrated_range == (0.667, 3.333)
    assert vector.info["calibration"]["budget"] == {"others": 1.0, "accuracy": 1.0, "kl": 9.0, "repetition": 1.0}


@pytest.mark.usefixtures("moved")
def test_what_costs_more_than_the_budget_is_said(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        vector = calibrate(
            tiny, published, samples, layers=[1], strengths=[0.6], answerer=_scripted(samples), quiet=True
        )  # fmt: skip
    found = vector.info["calibration"]
    assert (found["targets_reached"], found["within_budget"], found["range"]) == (True, False, [1.0, 1.0])
    assert "accuracy 0.200 (at most 0.03), kl 0.300 (at most 0.25)." in caplog.text
    assert "does not reach" not in caplog.text


@pytest.mark.usefixtures("moved")
def test_what_does_not_steer_is_said(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], caplog: pytest.LogCaptureFixture
) -> None:
    vector = calibrate(tiny, published, samples, layers=[0], strengths=[0.3], answerer=_scripted(samples), quiet=True)
    assert vector.info["calibration"]["targets_reached"] is False
    assert "Steering does not reach its targets: Vision Ratio 0.44" in caplog.text


@pytest.mark.usefixtures("moved")
def test_the_first_three_of_the_ranking_are_tried_unless_layers_are_given(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    def tried(vector: SteeringVector, **options: Any) -> set[int]:
        made = calibrate(tiny, vector, samples, strengths=[0.3], answerer=_scripted(samples), quiet=True, **options)
        found = made.info["calibration"]
        return {point["layer"] for point in [*found["curve"], *found["others_tried"]]}

    assert tried(replace(published, info=published.info | {"ranking": [2, 1]})) == {2, 1}
    assert tried(published) == {1, 0, 2}
    assert tried(published, layers=[2]) == {2}


@pytest.mark.usefixtures("moved")
def test_the_calibration_is_part_of_the_artifact(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    vector = calibrate(
        tiny, published, samples, layers=[1, 0], strengths=STRENGTHS, answerer=_scripted(samples), quiet=True
    )
    again = SteeringVector.from_bytes(vector.to_bytes())
    assert again.info == vector.info
    told = {key: value for key, value in again.info.items() if key != "calibration"}
    assert told == {**published.info, "published": 0.3}
    assert again.published == 0.3
    torch.testing.assert_close(again.delta(1.0), published.delta(0.3, [1]))


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("strengths", [[0.0], [-0.1, 0.5], [float("inf")], [float("nan")], []])
def test_bad_strengths_are_refused(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], strengths: list[float]
) -> None:
    answerer = _scripted(samples)
    with pytest.raises(ValueError, match="Strengths must be positive and finite"):
        calibrate(tiny, published, samples, strengths=strengths, answerer=answerer, quiet=True)
    assert not answerer.asked


def test_no_samples_is_an_error(tiny: steering.Engine, vector: SteeringVector) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        calibrate(tiny, vector, [], quiet=True)


# --------------------------------------------------------------------------------------------------- a model that runs


def test_the_factor_is_folded_into_the_weight(tiny: steering.Engine) -> None:
    samples = make_samples(4)
    published = build(tiny, samples[:2], quiet=True)
    vector = calibrate(tiny, published, samples[2:], layers=[1], strengths=[0.5], quiet=True)
    calibration = vector.info["calibration"]
    assert vector.layers == (1,)
    assert (calibration["layer"], calibration["factor"], calibration["range"]) == (1, 0.5, [1.0, 1.0])
    assert calibration["published_weight"] == pytest.approx(float(published.weight[1]))
    torch.testing.assert_close(vector.weight, 0.5 * published.weight)
    torch.testing.assert_close(vector.direction, published.direction)
    torch.testing.assert_close(vector.delta(1.0), published.delta(0.5, [1]))
    assert [(point["layer"], point["dose"]) for point in calibration["curve"]] == [(1, 0.5)]
    assert set(calibration["baseline"]["plain"]) == {"s_vision", "s_text", "s_others", "vision_ratio", "n"}
    assert SteeringVector.from_bytes(vector.to_bytes()).info == vector.info


def test_a_random_model_misses_its_targets_and_says_so(
    tiny: steering.Engine, vector: SteeringVector, caplog: pytest.LogCaptureFixture
) -> None:
    made = calibrate(tiny, vector, make_samples(1), layers=[0, 1], strengths=[0.1], quiet=True)
    assert made.info["calibration"]["targets_reached"] is False
    assert "does not reach its targets" in caplog.text


def test_damage_is_that_of_the_engine_asked_by_hand(tiny: steering.Engine, vector: SteeringVector) -> None:
    samples = make_samples(2)
    made = calibrate(tiny, vector, samples, layers=[1], strengths=[0.3], quiet=True)
    steers = [Steer.to(vector, side, 0.3, layers=(1,)) for side in ("vision", "text")]
    asked = neutral.chats(samples)
    (point,) = made.info["calibration"]["curve"]
    assert point["kl"] == pytest.approx(max(neutral.shift(tiny, asked, steers, quiet=True)), rel=1e-3)
    said = [
        answer.text
        for answer in InProcess(tiny).answers(Question(chat, None, neutral.MAX_TOKENS) for chat in asked)
    ]  # fmt: skip
    plain = sum(neutral.repetition(text) for text in said) / len(said)
    assert made.info["calibration"]["baseline"]["repetition"] == pytest.approx(plain)
