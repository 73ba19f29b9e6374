"""The measurements of a calibration on a model with scripted answers, and the record of them."""

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
from probes.vector import neutral
from probes.vector.build import build
from probes.vector.calibrate import Budget, calibrate
from steering import Steer, SteeringVector
from tests.probes.conftest import Scripted, make_samples, text_of

# ------------------------------------------------------------------------------------- a model whose answers are known


SAMPLES = 10
STRENGTHS = (0.2, 0.3, 0.4, 0.6, 1.0)
KL = {0.2: 0.05, 0.3: 0.1, 0.4: 0.2, 0.6: 0.3, 1.0: 0.1}
ONCE = "the ball lies on the grass and nothing else is there"


def _scripted(samples: Sequence[ConflictSample]) -> Scripted:
    """Return an answerer whose answers depend on the push.

    Plainly four of ten follow the image, one neither. Layer 1 steers from 0.3 on, at 0.2 only every other sample; layer 0
    does nothing. With one modality alone all answers are right up to 0.4; at 0.6 the image alone loses a fifth toward text,
    the context alone a tenth toward text and half toward vision. At 1.0 neutral answers repeat themselves.
    """
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
    """Script the next-token shifts, greater toward text, and return the steers that were measured."""
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


def _calibrated(
    engine: steering.Engine, vector: SteeringVector, samples: list[ConflictSample], **options: Any
) -> SteeringVector:
    """Return the vector calibrated on the scripted model's answers."""
    return calibrate(engine, vector, samples, answerer=_scripted(samples), quiet=True, **options)


@pytest.mark.usefixtures("moved")
def test_a_scripted_model_is_measured_as_it_is(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    vector = _calibrated(tiny, published, samples, layers=[0, 1], strengths=STRENGTHS, finalists=2)
    found = vector.info["calibration"]
    assert found["baseline"] == {
        "plain": {"s_vision": 0.4, "s_text": 0.5, "s_others": 0.1, "vision_ratio": pytest.approx(4 / 9), "n": 10,
                  "vision_ratio_95": pytest.approx([0.1888, 0.7333], abs=1e-4)},  # Wilson's
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
    vector = _calibrated(tiny, published, samples, layers=[0, 1], strengths=STRENGTHS, finalists=1)
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
    chosen = {key: value for key, value in curve[0.3].items() if key != "strength"}
    for side in ("vision", "text"):
        low, high = found["chosen"][side].pop("vision_ratio_95")
        assert 0 <= low <= found["chosen"][side]["vision_ratio"] <= high <= 1
    assert found["chosen"] == chosen
    assert [(point["layer"], point["dose"]) for point in found["others_tried"]] == [
        (0, strength) for strength in STRENGTHS
    ]
    assert found["others_tried"][-1]["text"]["s_text"] == 0.5


def test_shifts_are_asked_for_both_ways_of_the_same_doses(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], moved: list[Steer]
) -> None:
    _calibrated(tiny, published, samples, layers=[1], strengths=[0.4, 0.2])
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
    vector = _calibrated(tiny, published, samples, layers=[1], strengths=strengths)
    assert vector.info["calibration"]["factor"] == 0.3
    assert vector.info["calibration"]["range"] == expected
    assert vector.calibrated_range == tuple(expected)
    assert Steer.to(vector, "text", expected[1]).warning() is None
    assert Steer.to(vector, "text", expected[1] + 0.1).warning() is not None


@pytest.mark.usefixtures("moved")
def test_a_strength_of_the_same_layer_that_is_no_finalist_may_still_be_chosen(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KL, 0.3, 0.3)
    vector = _calibrated(tiny, published, samples, layers=[1], strengths=STRENGTHS, finalists=1)
    assert vector.info["calibration"]["factor"] == 0.4
    assert vector.info["calibration"]["within_budget"] is True


@pytest.mark.usefixtures("moved")
def test_a_wider_budget_gives_a_wider_range(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    wide = Budget(others=1.0, accuracy=1.0, kl=9.0, repetition=1.0)
    vector = _calibrated(tiny, published, samples, layers=[1], strengths=STRENGTHS, budget=wide)
    assert vector.calibrated_range == (0.667, 3.333)
    assert vector.info["calibration"]["budget"] == {"others": 1.0, "accuracy": 1.0, "kl": 9.0, "repetition": 1.0}


@pytest.mark.usefixtures("moved")
def test_what_costs_more_than_the_budget_is_said(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        vector = _calibrated(tiny, published, samples, layers=[1], strengths=[0.6])
    found = vector.info["calibration"]
    assert (found["targets_reached"], found["within_budget"], found["range"]) == (True, False, [1.0, 1.0])
    assert "accuracy 0.200 (at most 0.03), kl 0.300 (at most 0.25)." in caplog.text
    assert "does not reach" not in caplog.text


@pytest.mark.usefixtures("moved")
def test_what_does_not_steer_is_said(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample], caplog: pytest.LogCaptureFixture
) -> None:
    vector = _calibrated(tiny, published, samples, layers=[0], strengths=[0.3])
    assert vector.info["calibration"]["targets_reached"] is False
    assert "Steering does not reach its targets: Vision Ratio 0.44" in caplog.text


@pytest.mark.usefixtures("moved")
def test_the_first_three_of_the_ranking_are_tried_unless_layers_are_given(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    def tried(vector: SteeringVector, **options: Any) -> set[int]:
        made = _calibrated(tiny, vector, samples, strengths=[0.3], **options)
        found = made.info["calibration"]
        return {point["layer"] for point in [*found["curve"], *found["others_tried"]]}

    assert tried(replace(published, info=published.info | {"ranking": [2, 1]})) == {2, 1}
    assert tried(published) == {1, 0, 2}
    assert tried(published, layers=[2]) == {2}


@pytest.mark.usefixtures("moved")
def test_the_calibration_is_part_of_the_artifact(
    tiny: steering.Engine, published: SteeringVector, samples: list[ConflictSample]
) -> None:
    vector = _calibrated(tiny, published, samples, layers=[1, 0], strengths=STRENGTHS)
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


@pytest.mark.usefixtures("short_answers")
def test_the_factor_is_folded_into_the_weight(tiny: steering.Engine) -> None:
    samples = make_samples(3)
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


@pytest.mark.usefixtures("short_answers")
def test_a_random_model_misses_its_targets_and_says_so(
    tiny: steering.Engine, vector: SteeringVector, caplog: pytest.LogCaptureFixture
) -> None:
    made = calibrate(tiny, vector, make_samples(1), layers=[0, 1], strengths=[0.1], quiet=True)
    assert made.info["calibration"]["targets_reached"] is False
    assert "does not reach its targets" in caplog.text


def test_damage_is_that_of_the_engine_asked_by_hand(
    tiny: steering.Engine, vector: SteeringVector, short_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neutral, "MAX_TOKENS", 64)  # after which something is repeated
    samples = make_samples(2)[1:]
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
    assert plain > 0
    assert made.info["calibration"]["baseline"]["repetition"] == pytest.approx(plain)
