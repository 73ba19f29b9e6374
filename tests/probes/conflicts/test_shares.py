"""Answers read by hand, shares by hand and their intervals by an independent bootstrap."""

from __future__ import annotations

import json

import numpy as np
import pytest

from probes.conflicts.shares import Outcome, Shares, letter, outcome


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


def resampled(outcomes: list[Outcome], resamples: int) -> dict[str, tuple[float, float]]:
    """The 95 % intervals from samples that are really drawn anew."""
    rng = np.random.default_rng(12)
    names = np.array(outcomes)
    values: dict[str, list[float]] = {"s_vision": [], "s_text": [], "s_others": [], "vision_ratio": []}
    for _ in range(resamples):
        drawn = names[rng.integers(len(names), size=len(names))]
        vision, text, others = ((drawn == name).sum() for name in ("vision", "text", "others"))
        for name, count in (("s_vision", vision), ("s_text", text), ("s_others", others)):
            values[name].append(count / len(names))
        if vision + text:
            values["vision_ratio"].append(vision / (vision + text))
    return {name: (np.quantile(one, 0.025), np.quantile(one, 0.975)) for name, one in values.items()}


@pytest.mark.parametrize("counts", [(240, 100, 60), (3, 2, 15)])
def test_intervals_are_those_of_a_bootstrap_over_samples(counts: tuple[int, int, int]) -> None:
    outcomes: list[Outcome] = [*["vision"] * counts[0], *["text"] * counts[1], *["others"] * counts[2]]
    shares = Shares.of(outcomes, resamples=4000, seed=3)
    expected = resampled(outcomes, 4000)
    assert set(shares.intervals) == set(expected)
    for name, interval in shares.intervals.items():
        step = 1 / (counts[0] + counts[1] if name == "vision_ratio" else len(outcomes))
        assert interval == pytest.approx(expected[name], abs=1.5 * step), name
        assert interval[0] < getattr(shares, name) < interval[1], name


def test_intervals_are_seeded_and_reported_by_field() -> None:
    outcomes: list[Outcome] = [*["vision"] * 30, *["text"] * 10]
    shares = Shares.of(outcomes, resamples=200, seed=3)
    assert shares == Shares.of(outcomes, resamples=200, seed=3)
    assert shares.intervals != Shares.of(outcomes, resamples=200, seed=4).intervals
    report = shares.to_json()
    assert report["vision_ratio_95"] == list(shares.intervals["vision_ratio"])
    assert report["s_text_95"] == list(shares.intervals["s_text"])
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_intervals_where_nothing_varies() -> None:
    vision = Shares.of(["vision"] * 5, resamples=100).intervals
    assert vision == {"s_vision": (1, 1), "s_text": (0, 0), "s_others": (0, 0), "vision_ratio": (1, 1)}
    assert Shares.of(["text"], resamples=100).intervals["vision_ratio"] == (0, 0)
    others = Shares.of(["others"] * 5, resamples=100)
    assert others.intervals == {"s_vision": (0, 0), "s_text": (0, 0), "s_others": (1, 1)}
    assert "vision_ratio_95" not in others.to_json()
    assert Shares.of([], resamples=100).intervals == {}


def test_a_ratio_that_some_resamples_lack_is_that_of_the_others() -> None:
    low, high = Shares.of(["vision", "others", "others"], resamples=500).intervals["vision_ratio"]
    assert (low, high) == (1.0, 1.0)


def test_a_share_toward_a_side_is_that_sides() -> None:
    shares = Shares.of(["vision", "vision", "text", "others"])
    assert (shares.toward("vision"), shares.toward("text")) == (0.5, 0.25)
