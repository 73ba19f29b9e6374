"""The conditions and the report with a scripted model, so that every number is known by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import numpy as np
import pytest

from probes.answering.base import Reply
from probes.conflicts import samples as mc2
from probes.mc2.evaluate import KINDS, Evaluation, evaluate
from tests.probes.mc2.scripted import (
    SCRIPT,
    SHOTS,
    STEERING,
    VECTOR,
    Scripted,
    balls,
    by_script,
    said,
    script_name,
    simple_vector,  # noqa: F401 -- test_command.py has it from here
)

FIELDS = {"s_vision", "s_text", "s_others", "vision_ratio", "n"}


# ------------------------------------------------------------------------------------------------------ conditions


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted(by_script)


@pytest.fixture(scope="module")
def evaluation(scripted: Scripted) -> Evaluation:
    return evaluate(scripted, balls(5), steering=STEERING, shots=SHOTS, quiet=True)


def test_shares_of_every_condition_by_hand(evaluation: Evaluation) -> None:
    shares = {name: condition.shares for name, condition in evaluation.conditions.items()}
    assert {
        name: (round(5 * s.s_vision), round(5 * s.s_text), round(5 * s.s_others)) for name, s in shares.items()
    } == {
        "plain": (2, 1, 2),
        "instruct_vision": (3, 0, 2),
        "instruct_text": (2, 3, 0),
        "chain_vision": (2, 2, 1),
        "chain_text": (1, 4, 0),
        "shots_vision": (1, 0, 4),
        "shots_text": (0, 3, 2),
        "vision": (4, 1, 0),
        "text": (0, 5, 0),
    }
    assert all(share.n == 5 for share in shares.values())
    assert shares["plain"].vision_ratio == pytest.approx(2 / 3)
    assert shares["text"].vision_ratio == 0


def test_kinds_and_sides_of_the_conditions(evaluation: Evaluation) -> None:
    kinds = {name: (condition.kind, condition.side) for name, condition in evaluation.conditions.items()}
    assert kinds["plain"] == ("plain", None)
    assert kinds["vision"] == ("steer", "vision")
    assert kinds["text"] == ("steer", "text")
    for kind in ("instruct", "chain", "shots"):
        for side in mc2.SIDES:
            assert kinds[f"{kind}_{side}"] == (kind, side)


def test_shares_by_task_by_hand(evaluation: Evaluation) -> None:
    by_task = evaluation.conditions["plain"].by_task  # balls 0, 2, 4: v t n; balls 1, 3: v a
    assert list(by_task) == ["color", "shape"]
    color, shape = by_task["color"], by_task["shape"]
    assert (color.s_vision, color.s_text, color.s_others, color.vision_ratio, color.n) == (1 / 3, 1 / 3, 1 / 3, 0.5, 3)
    assert (shape.s_vision, shape.s_text, shape.s_others, shape.vision_ratio, shape.n) == (0.5, 0, 0.5, 1, 2)


def test_consistent_and_unanswered_by_hand(evaluation: Evaluation) -> None:
    report = evaluation.to_json()
    assert report["plain"]["consistent"] == pytest.approx(3 / 5)
    assert report["plain"]["unanswered"] == pytest.approx(2 / 10)
    assert report["shots_vision"]["unanswered"] == pytest.approx(8 / 10)
    assert report["text"]["unanswered"] == 0


def test_one_modality_alone_is_asked_where_nothing_instructs(evaluation: Evaluation) -> None:
    alone_by_condition = {
        name: (condition.image_only, condition.context_only) for name, condition in evaluation.conditions.items()
    }
    # Right answers of both orders; "a" and "b" are right in one of them.
    assert alone_by_condition.pop("plain") == pytest.approx((8 / 10, 6 / 10))
    assert alone_by_condition.pop("vision") == pytest.approx((10 / 10, 4 / 10))
    assert alone_by_condition.pop("text") == pytest.approx((4 / 10, 9 / 10))
    assert set(alone_by_condition.values()) == {(None, None)}
    report = evaluation.to_json()
    assert (report["plain"]["no_conflict_accuracy"], report["plain"]["context_only_accuracy"]) == pytest.approx(
        (0.8, 0.6)
    )
    assert "no_conflict_accuracy" not in report["chain_text"]


def test_the_attention_ratio_is_the_mean_of_what_was_measured(evaluation: Evaluation) -> None:
    # Balls 0, 1, 2, 4: .0 .1, .1 .2, .2 .3, .4 .5
    assert evaluation.conditions["plain"].attention_ratio == pytest.approx(1.8 / 8)
    assert evaluation.conditions["instruct_text"].attention_ratio == pytest.approx(0.5)


def test_an_attention_ratio_that_nobody_measured_is_left_out() -> None:
    evaluation = evaluate(Scripted(lambda question: Reply("A")), balls(1), kinds=["plain"], quiet=True)
    assert evaluation.conditions["plain"].attention_ratio is None
    assert "attention_ratio" not in evaluation.to_json()["plain"]


def test_every_question_is_asked_once_as_its_condition_wants(scripted: Scripted, evaluation: Evaluation) -> None:
    assert len(scripted.asked) == len(SCRIPT) * 5 * 2
    assert len({(script_name(question), question.ball, question.swapped) for question in scripted.asked}) == len(
        scripted.asked
    )
    for question in scripted.asked:
        assert question.question.max_tokens == (512 if question.setting.startswith("chain") else 24)
        if question.push is not None:
            assert (question.push.vector, question.push.strength, question.push.layers) == (VECTOR, 1.5, (0, 2))
        example_images = [
            part["image"] for turn in question.question.chat[:-1:2] for part in turn["content"] if "image" in part
        ]
        assert example_images == ([shot.image for shot in SHOTS] if question.setting.startswith("shots") else [])
    assert scripted.ended


def exact_interval(differences: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean from all possible resamples."""
    means = [sum(drawn) / len(drawn) for drawn in itertools.product(differences, repeat=len(differences))]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def test_advantages_are_paired_differences_from_the_best_other_condition(evaluation: Evaluation) -> None:
    vision, text = evaluation.advantages()
    # vvvvt less vvnnv, ttttt less ttttv
    assert (vision.side, vision.other, text.side, text.other) == ("vision", "instruct_vision", "text", "chain_text")
    assert vision.difference == pytest.approx((0 + 0 + 1 + 1 - 1) / 5)
    assert vision.interval == pytest.approx(exact_interval([0, 0, 1, 1, -1]))
    assert text.difference == pytest.approx(1 / 5)
    assert text.interval == pytest.approx(exact_interval([0, 0, 0, 0, 1]))
    assert evaluation.to_json()["advantages"]["vision"] == {
        "other": "instruct_vision", "difference": pytest.approx(0.2), "difference_95": list(vision.interval),
    }  # fmt: skip


def test_a_steering_that_is_worse_has_a_negative_advantage() -> None:
    codes = {"vision": "ttvv", "text": "vvvv", "instruct_vision": "vvvv", "instruct_text": "tttt"}
    answerer = Scripted(
        lambda question: Reply(said(codes.get(script_name(question), "vvvv")[question.ball], question.swapped))
    )
    evaluation = evaluate(answerer, balls(4), steering=STEERING, kinds=["instruct", "steer"], quiet=True)
    assert [advantage.difference for advantage in evaluation.advantages()] == [-0.5, -1.0]
    squared = 1.959964**2  # of four samples that all differ alike, the score interval
    assert evaluation.advantages()[1].interval == pytest.approx((-1.0, (squared - 4) / (squared + 4)))


@pytest.mark.parametrize("kinds", [["plain", "steer"], ["plain", "instruct", "chain"]])
def test_no_advantage_without_something_to_compare(kinds: list[str]) -> None:
    evaluation = evaluate(Scripted(lambda question: Reply("A")), balls(1), steering=STEERING, kinds=kinds, quiet=True)
    assert evaluation.advantages() == []
    assert "advantages" not in evaluation.to_json()


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report_has_the_agreed_fields(evaluation: Evaluation) -> None:
    report = evaluation.to_json()
    sided = {f"{kind}_{side}" for kind in ("instruct", "chain", "shots") for side in mc2.SIDES}
    assert set(report) == {"plain", "vision", "text", "advantages", *sided}
    for name, condition in report.items():
        if name != "advantages":
            assert set(condition) >= FIELDS
            assert condition["n"] == 5
            assert condition["s_vision"] + condition["s_text"] + condition["s_others"] == pytest.approx(1)
            assert set(condition["by_task"]) == {"color", "shape"}
            low, high = condition["s_text_95"]
            assert low <= condition["s_text"] <= high
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_null_where_no_ratio_exists() -> None:
    evaluation = evaluate(Scripted(lambda question: Reply("Sorry.")), balls(2), kinds=["plain"], quiet=True)
    plain = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))["plain"]
    assert {name: plain[name] for name in FIELDS} == {
        "s_vision": 0.0, "s_text": 0.0, "s_others": 1.0, "vision_ratio": None, "n": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (("plain",), {"plain"}),
        (("shots", "plain", "plain"), {"plain", "shots_vision", "shots_text"}),
        (("steer",), {"vision", "text"}),
        (KINDS[:3], {"plain", "instruct_vision", "instruct_text", "chain_vision", "chain_text"}),
    ],
)
def test_only_requested_conditions_are_asked(kinds: tuple[str, ...], names: set[str]) -> None:
    answerer = Scripted(by_script)
    evaluation = evaluate(answerer, balls(2), steering=STEERING, kinds=kinds, shots=SHOTS, quiet=True)
    assert set(evaluation.to_json()) == names
    assert {script_name(question).split()[0] for question in answerer.asked} == names


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kinds": ["plain", "guess"]}, "Unknown conditions: guess; there are plain, instruct, chain, shots, steer"),
        ({"kinds": ["plain", "steer"]}, "The condition 'steer' needs a vector"),
        ({"kinds": ["shots"]}, "The condition 'shots' needs solved examples"),
        ({"kinds": ["plain"], "random_directions": 1}, "Random directions need the vector whose size they have"),
    ],
)
def test_unknown_conditions_and_missing_inputs_are_named(more: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(Scripted(lambda question: Reply("A")), balls(1), quiet=True, **more)  # type: ignore[arg-type]
