"""The ranking of yes/no questions, against the definitions counted by hand and a shift that must change nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.answering.odds import log_odds
from probes.harness.bootstrap import area_with_interval, best_accuracies, ranked, wilson
from probes.harness.comparison import BASELINE, compare
from probes.image_qa.yes_no import YesNo, part
from steering import See
from tests.probes.conftest import Scripted

SCORES = [2.0, 1.0, 1.0, 0.5, -0.5, -1.0, 3.0]
TRUTHS = [True, True, False, True, False, False, False]


def test_auroc_and_best_accuracy_by_counting() -> None:
    pairs = [(a, b) for (a, t), (b, u) in itertools.product(zip(SCORES, TRUTHS, strict=True), repeat=2) if t and not u]
    area = np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs])
    cuts = [-math.inf, *SCORES, math.inf]
    best = max(np.mean([(s >= cut) == t for s, t in zip(SCORES, TRUTHS, strict=True)]) for cut in cuts)
    found = ranked(SCORES, TRUTHS, range(7))
    assert found["auroc"]["value"] == pytest.approx(area)
    assert found["best_accuracy"]["value"] == pytest.approx(best)
    low, high = found["best_accuracy"]["value_95"]
    assert 0 < low < high <= 1


def test_best_accuracy_of_resamples_is_that_of_the_samples_repeated() -> None:
    rng = np.random.default_rng(3)
    values, truths = rng.integers(0, 5, 30).astype(float), rng.random(30) < 0.4
    times = rng.multinomial(30, np.full(30, 1 / 30), 20)
    for row, accuracy in zip(times, best_accuracies(times, values, truths), strict=True):
        repeated, wanted = np.repeat(values, row), np.repeat(truths, row)
        cuts = [*np.unique(values), np.inf]
        assert accuracy == pytest.approx(max(((repeated >= cut) == wanted).mean() for cut in cuts))


def test_a_shift_of_the_threshold_changes_neither() -> None:
    shifted = ranked([score + 5 for score in SCORES], TRUTHS, range(7), SCORES)
    for name in ("auroc", "best_accuracy"):
        assert shifted[name]["difference"] == 0
        assert shifted[name]["difference_95"] is None  # no resample differs


def test_questions_without_a_score_are_left_out_of_both() -> None:
    found = ranked([*SCORES, None, 1.0], [*TRUTHS, True, True], range(9), [*SCORES, 1.0, None])
    assert found["auroc"]["value"] == ranked(SCORES, TRUTHS, range(7))["auroc"]["value"]
    assert ranked([1.0, 2.0], [True, True], range(2))["auroc"] == {"value": None, "value_95": None}
    assert ranked([], [], [])["best_accuracy"]["value"] is None


@pytest.mark.parametrize(
    ("first", "odds"),
    [
        ([("Yes", -0.1), ("No", -2.5)], 2.4),
        ([(" yes", -1.0), ("YES", -1.0), ("no", -1.0)], math.log(2)),
        ([("Yes", -0.1), ("The", -1e9)], -0.1 - math.log(1 - math.exp(-0.1))),  # no has at most what they leave of 1
        ([("No", -0.9), ("A", -1.0), ("The", -3.0)], -3.0 + 0.9),  # and at most the least of theirs
        ([("Yes", 0.0)], 20.0),  # all others are impossible, as under a contrast
        ([("No", 0.0)], -20.0),
        ([("The", -0.1), ("A", -3.0)], None),
    ],
)
def test_log_odds_of_yes(first: list[tuple[str, float]], odds: float | None) -> None:
    assert log_odds(first) == (None if odds is None else pytest.approx(odds))


@pytest.mark.parametrize(("wanted", "others"), [(4, 4), (6, 40), (40, 6)])
def test_the_area_of_samples_that_are_all_told_apart_is_not_certain(wanted: int, others: int) -> None:
    """Its bound is Wilson's of so many of so many independent pairs, n / (n + z^2)."""
    values = np.concatenate([np.arange(wanted) + 100.0, np.arange(others)])
    is_wanted, pairs = np.arange(wanted + others) < wanted, min(wanted, others)
    least = pairs / (pairs + 1.959964**2)
    assert area_with_interval(values, is_wanted) == (1.0, (pytest.approx(least), 1.0))
    assert area_with_interval(-values, is_wanted) == (0.0, (0.0, pytest.approx(1 - least)))
    strata = np.arange(wanted + others) % 2
    assert area_with_interval(values, is_wanted, strata) == (1.0, (pytest.approx(least), 1.0))


def test_a_ranking_without_a_fault_is_not_certain() -> None:
    """Its AUROC has the interval of `area_with_interval`, with the clusters of the rarer kind as the pairs."""
    truths, scores = [True] * 4 + [False] * 6, [1.0] * 4 + [0.0] * 6
    found = ranked(scores, truths, range(10))
    assert found["auroc"]["value_95"] == list((area_with_interval(np.array(scores), np.array(truths)) or (0, ()))[1])
    assert found["best_accuracy"] == {"value": 1, "value_95": None}
    turned = ranked([-score for score in scores], truths, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert (turned["auroc"]["value"], turned["auroc"]["value_95"]) == (0, list(wilson(0, 2)))


def test_a_benchmark_tells_a_habit_from_an_ability() -> None:
    """A condition that says yes to everything, in the order of the plain answers, loses accuracy and no ranking."""
    picture = Image.new("RGB", (8, 8))
    samples = [YesNo(picture, f"{number}", number % 2 == 0, "random") for number in range(8)]

    def answer(question: Question) -> Reply:
        assert question.odds
        number = int(question.chat[0]["content"][-1]["text"])
        score = (1.0 if number % 2 == 0 else -1.0) + (3.0 if question.interventions else 0.0)
        return Reply("Yes." if score > 0 else "No.", odds=score)

    results = compare(
        Scripted(answer), {BASELINE: (), "always": (See(),)}, [part("existence", samples)], max_tokens=4, quiet=True
    )
    always = results["always"]["existence"]["all"]
    assert (always["accuracy"]["value"], always["accuracy"]["difference"]) == (0.5, -0.5)
    assert (always["auroc"]["value"], always["auroc"]["difference"]) == (1, 0)
    assert always["best_accuracy"]["value"] == 1
