"""Random directions as a control, the order of the questions, and the names of conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import steering
from probes.answering.base import Reply
from probes.conflicts.asking import Answers, Condition, ask
from probes.conflicts.samples import Side
from probes.conflicts.shares import Shares
from probes.mc2.evaluate import Preference, conditions_of, evaluate, random_like, spread
from probes.vector.build import build
from steering import SteeringVector
from tests.probes.conftest import make_samples
from tests.probes.mc2.scripted import STEERING, AskedQuestion, Scripted, balls, by_script, said, script_name

# -------------------------------------------------------------------------------------------------------- controls


def test_random_directions_are_pushed_toward_text_and_counted_each() -> None:
    codes = {"random-7": "ttva", "random-8": "vvvt", "random-9": "nnna"}

    def rule(question: AskedQuestion) -> Reply:
        if question.push is None:
            return Reply("A")
        assert isinstance(question.push.vector, SteeringVector)
        return Reply(said(codes.get(question.push.vector.name, "nnnn")[question.ball], question.swapped))

    answerer = Scripted(rule)
    evaluation = evaluate(
        answerer, balls(4), steering=STEERING, kinds=["plain"], random_directions=3, seed=7, quiet=True
    )
    assert [(shares.s_vision, shares.s_text, shares.s_others) for shares in evaluation.random] == [
        (0.25, 0.5, 0.25), (0.75, 0.25, 0), (0, 0, 1),
    ]  # fmt: skip
    pushes = [question.push for question in answerer.asked if question.push is not None]
    assert {(push.toward, push.strength, push.layers) for push in pushes} == {("text", 1.5, (0, 2))}
    report = evaluation.to_json()["random"]
    assert report["directions"] == 3
    assert report["vision_ratio"] == {"min": pytest.approx(1 / 3), "mean": pytest.approx(13 / 24), "max": 0.75}
    assert report["s_others"] == {"min": 0, "mean": pytest.approx(1.25 / 3), "max": 1}
    assert [shares["s_text"] for shares in report["each"]] == [0.5, 0.25, 0]


def test_random_directions_are_the_same_dose(tiny: steering.Engine) -> None:
    vector = build(tiny, make_samples(2), layers=[1], quiet=True)
    first, again, different = random_like(vector, 1), random_like(vector, 1), random_like(vector, 2)
    everywhere = range(len(vector.direction))
    torch.testing.assert_close(first.delta(0.7, everywhere).norm(dim=-1), vector.delta(0.7, everywhere).norm(dim=-1))
    torch.testing.assert_close(first.direction, again.direction)
    cosine = torch.nn.functional.cosine_similarity(first.direction, different.direction, dim=-1)
    assert cosine.abs().max() < 0.6
    assert first.layers == vector.layers


def test_ratios_that_do_not_exist_are_left_out_of_the_spread() -> None:
    assert spread([0.2, None, 0.6]) == {"min": 0.2, "mean": pytest.approx(0.4), "max": 0.6}
    assert spread([None]) == {"min": None, "mean": None, "max": None}


# ---------------------------------------------------------------------------------------------------------- asking


def test_accuracy_counts_questions_not_samples() -> None:
    answers = Answers([("A", "B"), ("A", "A"), (None, "B"), ("B", "A")])
    assert answers.accuracy() == 4 / 8
    assert answers.accuracy("text") == 3 / 8
    assert answers.right("vision") == [1, 0.5, 0.5, 0]
    assert answers.outcomes == ["vision", "others", "others", "text"]


def test_both_orders_of_a_sample_follow_each_other_under_every_condition() -> None:
    answerer = Scripted(by_script)
    plain, pushed = ask(answerer, balls(2), [Condition(), Condition("plain", STEERING.toward("text"))], quiet=True)
    assert [(question.ball, script_name(question), question.swapped) for question in answerer.asked] == [
        (ball, name, swapped) for ball in (0, 1) for name in ("plain", "text") for swapped in (False, True)
    ]
    assert (plain.outcomes, pushed.outcomes) == (["vision", "vision"], ["text", "text"])
    assert plain.letters == [("A", "B"), ("A", "B")]
    assert [[reply.text for reply in pair] for pair in pushed.replies] == [["B", "A"], ["B", "A"]]


def measured(kind: str = "plain", side: Side | None = None, codes: str = "v") -> Preference:
    """Return a condition of which only the outcomes are known."""
    letters = {"v": ("A", "B"), "t": ("B", "A"), "o": ("A", "A")}
    answers = Answers([letters[code] for code in codes], [(Reply(""), Reply(""))] * len(codes))
    return Preference.of(kind, side, balls(len(codes)), answers)


def test_rows_name_the_place_in_the_report() -> None:
    """What the rows call "vision" is instructed, and what the report calls so is steered."""
    conditions = conditions_of(("plain", "instruct", "steer"), STEERING, (), "paper").values()
    of_key = {condition.report_key: condition for condition in conditions}
    assert list(of_key) == ["plain", "instruct_vision", "instruct_text", "vision", "text"]
    assert (of_key["instruct_vision"].name, of_key["instruct_vision"].push) == ("vision", None)
    assert (of_key["vision"].name, of_key["vision"].setting) == ("steered toward vision", "plain")


def test_a_condition_is_named_by_kind_and_side() -> None:
    assert measured().name == "plain"
    assert measured("steer", "text").name == "text"
    assert measured("chain", "vision").name == "chain_vision"
    assert replace(measured("steer", "vision", "vto"), image_only=0.0).to_json()["no_conflict_accuracy"] == 0
    assert measured(codes="vto").shares == Shares.of(["vision", "text", "others"], intervals=True)
