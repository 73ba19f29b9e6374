"""Answers read by hand, shares by hand and their intervals by the score test that they invert."""

from __future__ import annotations

import json
from statistics import NormalDist

import numpy as np
import pytest

from probes.answering.letters import letter
from probes.conflicts.shares import Outcome, Shares, outcome


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("A", "A"),
        (" B\n", "B"),
        ("a", "A"),
        ("(B)", "B"),
        ("**A**", "A"),
        ("B.", "B"),
        ("A. red", "A"),
        ("B: blue", "B"),
        ("A) red, as the image shows", "A"),
        ("A - red", "A"),
        ("A\nThe ball is red.", "A"),
        ("A red", "A"),
        ("B blue", "B"),
        ("Answer: A", "A"),
        ("The correct answer is B.", "B"),
        ("The correct answer is B because the text says so.", "B"),
        ("the answer is (A) red", "A"),
        ("I would choose option B", "B"),
        ("It is red, so A.", "A"),
        ("The ball is red.", "A"),
        ("BLUE", "B"),
        ("", None),
        ("Sorry, I can't help with it.", None),
        ("A and B", None),
        ("A or B", None),
        ("The answer is A or the answer is B", None),
        ("The ball is red or blue.", None),
        ("A dog is in the image.", None),
        ("reddish", None),
        ("C", None),
    ],
)
def test_answers_read_by_hand(answer: str, chosen: str | None) -> None:
    assert letter(answer, ("red", "blue")) == chosen


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("D", "D"),
        ("(c)", "C"),
        ("The answer is C. three", "C"),
        ("E", None),
        ("Sorry, I can't help with it.", "D"),
        ("B. two or C. three? The answer is C", "C"),
        ("twenty", None),
    ],
)
def test_one_of_many_options(answer: str, chosen: str | None) -> None:
    assert letter(answer, ("one", "two", "three", "Sorry, I can't help with it")) == chosen


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("The picture shows a red ball. The text says it is blue.\nThe answer is B", "B"),
        ("First, the text context says blue. So the image is to be ignored. The answer is A.", "A"),
        ("Option A matches the image and option B matches the text. The text counts, so the answer is B.", "B"),
        ("A. red is what the image shows.\nB. blue is what the text says.\nThe answer is B", "B"),
        ("A) red or B) blue? I follow the picture.\n\n**The answer is A**", "A"),
        ("The answer is not B. Option A fits the picture and B) the text. Therefore the answer is A. red", "A"),
        ("At first sight the answer is A. But the text says otherwise: the answer is (B) blue.", "B"),
        ("I am to end with 'The answer is A' or 'The answer is B'.", None),
        ("It may be that the answer is A or that the answer is B", None),
        ("Option A matches the image and option B", None),
    ],
)
def test_a_chain_of_thought_is_read_by_its_end(answer: str, chosen: str | None) -> None:
    assert letter(answer, ("red", "blue")) == chosen


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("<think>The image shows A. red, the text says B.</think> <answer>B</answer>", "B"),
        ("<think>red or blue</think>\n<answer> A. red </answer>", "A"),
        ("<answer>A</answer> No: the text counts. <answer>blue</answer>", "B"),
        ("<think>I am to use <answer> </answer> tags. It is red.</think><answer>B", "B"),  # cut off before it closed
        ("<THINK>A</THINK><Answer>B. blue</Answer> The answer is A", "B"),
        ("<answer></answer>", None),
        ("<answer>A or B</answer> so A", None),
        # without an <answer> what follows the thoughts is read, and thoughts that do not end are no answer
        ("<think>The image shows A. red.</think> The answer is B.", "B"),
        ("The image shows A. red.</think> B", "B"),
        ("<think>The image shows A. red, so the answer is A", None),
    ],
)
def test_a_chain_of_thought_is_read_by_its_tags(answer: str, chosen: str | None) -> None:
    assert letter(answer, ("red", "blue")) == chosen


def test_an_option_inside_the_other_is_not_taken_for_it() -> None:
    assert letter("It is light blue.", ("light blue", "blue")) == "A"
    assert letter("It is blue.", ("light blue", "blue")) == "B"


@pytest.mark.parametrize(
    ("first", "second", "category"),
    [
        ("A", "B", "vision"),
        ("B", "A", "text"),
        ("A", "A", "others"),
        ("B", "B", "others"),
        ("A", None, "others"),
        (None, None, "others"),
    ],
)
def test_only_consistent_answers_count(first: str | None, second: str | None, category: str) -> None:
    assert outcome(first, second) == category


def test_shares_by_hand() -> None:
    shares = Shares.of(["vision", "vision", "vision", "text", "others"])
    assert shares == Shares(0.6, 0.2, 0.2, 0.75, 5)
    assert shares.to_json() == {"s_vision": 0.6, "s_text": 0.2, "s_others": 0.2, "vision_ratio": 0.75, "n": 5}


def test_the_ratio_is_null_where_no_answer_follows_a_modality() -> None:
    assert Shares.of(["others", "others"]).to_json()["vision_ratio"] is None
    assert Shares.of([]) == Shares(0.0, 0.0, 0.0, None, 0)


FIELDS = ("s_vision", "s_text", "s_others")


def scored(counted: int, of: int) -> tuple[float, float]:
    """Return the bounds of the shares p that a score test at 5 % does not reject.

    These satisfy |counted / of - p| <= z sqrt(p (1 - p) / of); their bounds are the roots of a quadratic.
    """
    z = NormalDist().inv_cdf(0.975) ** 2
    low, high = np.sort(np.roots([of + z, -(2 * counted + z), counted**2 / of]).real)
    return float(low), float(high)


@pytest.mark.parametrize("counts", [(240, 100, 60), (3, 2, 15), (5, 0, 0), (0, 1, 0), (0, 400, 1)])
def test_intervals_are_those_of_the_score_test(counts: tuple[int, int, int]) -> None:
    outcomes: list[Outcome] = [*["vision"] * counts[0], *["text"] * counts[1], *["others"] * counts[2]]
    shares = Shares.of(outcomes, intervals=True)
    expected = {name: scored(count, sum(counts)) for name, count in zip(FIELDS, counts, strict=True)}
    expected["vision_ratio"] = scored(counts[0], counts[0] + counts[1])
    assert shares.intervals.keys() == expected.keys()
    for name, interval in shares.intervals.items():
        assert interval == pytest.approx(expected[name], abs=1e-9), name
        assert 0 <= interval[0] <= getattr(shares, name) <= interval[1] <= 1, name
    assert Shares.of_counts(*counts, intervals=True) == shares


def test_an_interval_by_hand() -> None:
    # 2 of 8: (2 + z^2/2 -+ z sqrt(2 * 6 / 8 + z^2/4)) / (8 + z^2) with z^2 = 3.8415
    low, high = Shares.of(["vision"] * 2 + ["others"] * 6, intervals=True).intervals["s_vision"]
    assert (low, high) == (pytest.approx(0.0715, abs=5e-5), pytest.approx(0.5907, abs=5e-5))


def test_unanimous_answers_have_an_interval_too() -> None:
    vision = Shares.of(["vision"] * 400, intervals=True).intervals
    assert vision["s_vision"] == (pytest.approx(400 / 403.8415, abs=1e-5), 1)  # n / (n + z^2)
    assert vision["s_others"] == (0, pytest.approx(3.8415 / 403.8415, abs=1e-5))


def test_intervals_are_reported_by_field_where_they_exist() -> None:
    report = Shares.of(["vision"] * 30 + ["text"] * 10, intervals=True).to_json()
    assert {name for name in report if name.endswith("_95")} == {f"{name}_95" for name in (*FIELDS, "vision_ratio")}
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert "vision_ratio_95" not in Shares.of(["others"] * 5, intervals=True).to_json()
    assert Shares.of([], intervals=True).intervals == {}
    assert Shares.of(["vision"]).intervals == {}


def test_a_share_toward_a_side_is_that_sides() -> None:
    shares = Shares.of(["vision", "vision", "text", "others"])
    assert (shares.toward("vision"), shares.toward("text")) == (0.5, 0.25)
