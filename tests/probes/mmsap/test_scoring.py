"""MM-SAP's scores by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from probes.answering.base import Reply
from probes.harness.bootstrap import Tallies
from probes.mmsap.samples import SapSample
from probes.mmsap.scoring import SHARES, scores, tallies, tally, verdict
from steering.interventions.refusal import REFUSAL
from tests.probes.mmsap.making import sample

OPTIONS = ("blue", "red", REFUSAL, "teal")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("B", "right"),
        ("B. red", "right"),
        ("It is red.", "right"),
        ("A", "wrong"),
        ("C", "refused"),
        ("C. Sorry, I can't help with it", "refused"),
        ("Sorry, I can\u2019t help with it.", "refused"),
        ("I don't know what this is.", "refused"),
        ("I cannot tell from the picture", "refused"),
        ("E", "unread"),
        ("A or B", "unread"),
        ("Both A and B.", "unread"),
        ("The answer is (A) and (B).", "unread"),
        ("Not A, but B.", "right"),
        ("Between A and B, the answer is B", "right"),
        ("green", "unread"),
        ("", "unread"),
    ],
)
def test_an_answer_is_right_wrong_or_a_refusal(answer: str, expected: str) -> None:
    assert verdict(answer, OPTIONS, "red") == expected


def test_nothing_is_right_where_no_picture_tells() -> None:
    assert [verdict(letter, OPTIONS, None) for letter in "ABCD"] == ["wrong", "wrong", "refused", "wrong"]


def replies(sample: SapSample, *answers: str | None) -> list[Reply]:
    """Return the letters of these options as two runs of seed 3 offer them; None stands for no answer."""
    offered = [options for run in range(2) for options in sample.offered(run, 3)]
    letters = [
        None if option is None else "ABCD"[options.index(option)]
        for option, options in zip(answers, offered, strict=True)
    ]
    return [Reply(letter or "?") for letter in letters]


def summed(found: list[dict[str, float]]) -> Tallies:
    return {name: np.array(sum(tally_of_sample[name] for tally_of_sample in found)) for name in found[0]}


BASIC, KNOW, BEYOND = sample("basic"), sample("know"), sample("beyond")
SAID: list[tuple[SapSample, list[Reply]]] = [
    (BASIC, replies(BASIC, "red", REFUSAL)),  # a refusal of what can be seen never counts
    (BASIC, replies(BASIC, "blue", None)),
    (KNOW, replies(KNOW, REFUSAL, "red", REFUSAL, "blue")),  # known, and so wrongly refused; rightly refused
    (KNOW, replies(KNOW, "red", "red", "teal", "red")),
    (BEYOND, replies(BEYOND, REFUSAL, "blue")),
]


def measured(chosen: Any) -> dict[str, float]:
    shares = scores(
        summed([tally(sample, replies_of_sample, 3) for sample, replies_of_sample in SAID if sample in chosen])
    )
    return {name: float(value) for name, value in shares.items()}


def test_the_scores_of_each_part_and_of_all() -> None:
    assert measured([BASIC]) == pytest.approx(
        {
            "kk": 1 / 4, "ku": 0, "sa": 1 / 4, "answer_rate": 3 / 4, "answer_accuracy": 1 / 3, "unknown_knowns": np.nan,
            "knowledge": np.nan, "unread": 1 / 4,
        },
        nan_ok=True,
    )  # fmt: skip
    assert measured([KNOW]) == pytest.approx({
        "kk": 1 / 4, "ku": 1 / 4, "sa": 1 / 2, "answer_rate": 1 / 2, "answer_accuracy": 1 / 2, "unknown_knowns": 1 / 2,
        "knowledge": 3 / 4, "unread": 0,
    })  # fmt: skip
    assert measured([BEYOND])["ku"] == measured([BEYOND])["sa"] == 1 / 2
    assert measured([BASIC, KNOW, BEYOND]) == pytest.approx({
        "kk": 2 / 10, "ku": 2 / 10, "sa": 4 / 10, "answer_rate": 6 / 10, "answer_accuracy": 2 / 6, "unknown_knowns": 1 / 2,
        "knowledge": 3 / 4, "unread": 1 / 10,
    })  # fmt: skip


def test_runs_add_up() -> None:
    for question, answers in SAID:
        runs = tallies(question, answers, 3)
        assert len(runs) == 2
        assert tally(question, answers, 3) == {name: sum(run[name] for run in runs) for name in runs[0]}
        assert all(run[share.of] >= run[share.counted] for run in runs for share in SHARES.values())


def test_the_figures_of_the_paper() -> None:
    """InfMLLM on KnowVisQA: 25.0 of 350 refused, of which 42.47 % known (table 4), leave ku 4.11 (table 1)."""
    known_unknowns = 0.4247 * 25
    sums = {name: np.array(0.0) for name in {*(s.of for s in SHARES.values()), *(s.counted for s in SHARES.values())}}
    shares = scores(
        sums
        | {
            "asked": np.array(350.0),
            "rightly": np.array(25 - known_unknowns),
            "doubted": np.array(25.0),
            "known": np.array(known_unknowns),
        }
    )
    assert 100 * float(shares["ku"]) == pytest.approx(4.11, abs=0.005)
    assert 100 * float(shares["unknown_knowns"]) == pytest.approx(42.47)
