"""The scores of SAGE's evaluation, worked out by hand."""

from __future__ import annotations

import pytest
from PIL import Image

from probes.faithfulness import (
    Claim,
    Condition,
    Difference,
    Existence,
    as_markdown,
    claims,
    difference_scores,
    evaluate,
    existence_scores,
    stages,
    yes,
)
from steering import Engine, Generate, Sage, See, Think

SHAPES = ("star", "ring", "heart")
PICTURE = Image.new("RGB", (56, 56), "red")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The star changed from red to blue.", [Claim("color", "star")]),
        ("A red ring was added at the top. The heart moved from the left to the top.", [
            Claim("add", "ring"), Claim("position", "heart"),
        ]),
        ("The blue star at the left was removed.", [Claim("remove", "star")]),
        ("Something was removed.", [Claim("remove", None)]),
        ("There is no difference.", []),
        ("The starling moved from here.", [Claim("position", None)]),
    ],
)  # fmt: skip
def test_claims_are_read_off_sentences(answer: str, expected: list[Claim]) -> None:
    assert claims(answer, SHAPES) == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [("Yes, there is.", True), (" no.", False), ("Nobody knows", None), ("It is yes", None)]
)
def test_yes_and_no(answer: str, expected: bool | None) -> None:
    assert yes(answer) is expected


def test_existence_by_hand() -> None:
    samples = [Existence(PICTURE, "?", present, "random") for present in (True, True, True, False, False)]
    scores = existence_scores(samples, ["Yes.", "No.", "Yes.", "Yes.", "Well"])
    assert scores == {
        "accuracy": 2 / 5, "precision": 2 / 3, "recall": 2 / 3, "f1": pytest.approx(2 / 3), "yes": 3 / 5,
    }  # fmt: skip


def test_differences_by_hand() -> None:
    samples = [
        Difference(PICTURE, PICTURE, kind, what) for kind, what in (("color", "star"), ("add", "ring"), (None, None))
    ]
    answers = [
        ("The star changed from red to blue.", "No.", "Yes."),  # right and consistent
        ("The heart was removed. The ring was added.", "Yes.", "Yes."),  # one claim too many; a contradiction
        ("There is no difference.", "Yes.", "Perhaps."),  # right, ambiguous
    ]
    scores = difference_scores(samples, answers, SHAPES)
    # Two of three claims are true and both true differences are found: precision 2/3, recall 1.
    assert scores == {
        "dqr": 2 / 3, "ds": (1 + 0) / 2, "tf1": pytest.approx(0.8), "cf1": pytest.approx(0.8),
        "cr": pytest.approx((1 - 1 + 0.5) / 3), "contradictions": 1 / 3,
    }  # fmt: skip


def test_conditions_are_asked_and_scored_with_intervals(tiny: Engine) -> None:
    existence = [Existence(PICTURE, "Is there a star?", i % 2 == 0, "random") for i in range(4)]
    differences = [Difference(PICTURE, PICTURE, None, None)]
    conditions = {"baseline": Condition(), "See": Condition(Sage(See(alpha=0.5)))}
    report = evaluate(tiny, conditions, existence, differences, SHAPES, quiet=True)
    assert set(report) == {"baseline", "See"}
    assert set(report["See"]["existence"]) == {"all", "random"}
    for value, low, high in report["See"]["existence"]["all"].values():
        assert 0 <= low <= value <= high <= 1
    assert set(report["See"]["differences"]) == {"dqr", "ds", "tf1", "cf1", "cr", "contradictions"}


def test_tables_hold_every_condition_and_setting(tiny: Engine) -> None:
    existence = [Existence(PICTURE, "Is there a star?", True, "popular")]
    report = evaluate(
        tiny, {"a": Condition(), "b": Condition()}, existence, [Difference(PICTURE, PICTURE, None, None)], SHAPES, True
    )
    tables = as_markdown(report, "Title")
    for line in ("| a | popular |", "| b | all |", "| condition | dqr |"):
        assert line in tables


def test_the_stages_are_the_papers_one_after_the_other() -> None:
    plain = stages()
    assert list(plain) == ["baseline", "+ See", "+ Think", "+ Generate", "VCD", "ICD", "PAI"]
    assert plain["+ Think"] == Condition(Sage(See(alpha=0.1), Think(gamma=0.9)))
    assert plain["+ Generate"] == Condition(Sage(See(alpha=0.1), Think(gamma=0.9), Generate(weight=0.5)))
    assert set(plain) < set(stages(sweep=True))
