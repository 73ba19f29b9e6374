"""Doubts about a direction, by vectors made by hand and models with scripted answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from probes.answering.base import Question
from probes.conflicts.samples import WORDINGS
from probes.conflicts.shares import Shares
from probes.harness.bootstrap import interval
from probes.vector.direction import LEAST
from probes.vector.verdict import Followed, doubts, followed, unfounded, warnings
from steering import SteeringVector
from tests.probes.conftest import Scripted, make_samples, text_of

FOLLOWS = Followed(0.9, 0.2, 0.7, (0.6, 0.8), 50)


def _vector(agreement: float = 0.9, **info: Any) -> SteeringVector:
    ones = torch.ones(3)
    about = {"agreement": [0.1, agreement, 0.1], "samples": LEAST, **info}
    return SteeringVector("v", torch.ones(3, 4), ones, ones.clone(), ones.clone(), (1,), "model", info=about)


def _calibration(vision: tuple[float, float], text: tuple[float, float]) -> dict[str, Any]:
    """(S_v, S_t) of the chosen point toward either side."""
    chosen = {
        side: {"s_vision": pair[0], "s_text": pair[1]} for side, pair in (("vision", vision), ("text", text))
    }  # fmt: skip
    return {"calibration": {"chosen": chosen, "range": [1.0, 1.0]}}


# ------------------------------------------------------------------------------------------------------------ followed


def _obeys(numbers: set[int]) -> Any:
    """Follows the instructions in the samples of these numbers; follows the text in the others."""

    def answer(question: Question) -> str:
        text = text_of(question)
        number = int(text.split("The ball number ")[1].split()[0])
        return "red" if WORDINGS["paper"]["vision"] in text and number in numbers else "blue"

    return answer


def test_a_model_that_follows_its_instructions() -> None:
    found = followed(Scripted(_obeys(set(range(10)))), make_samples(10), quiet=True)
    assert found == Followed(1.0, 0.0, 1.0, (1.0, 1.0), 10)
    assert doubts(_vector(), found) == []


def test_a_model_that_follows_some_of_its_instructions() -> None:
    answerer = Scripted(_obeys({0, 1, 2}))
    found = followed(answerer, make_samples(10), seed=3, quiet=True)
    assert (found.toward_vision, found.toward_text, found.difference, found.n) == (0.3, 0.0, pytest.approx(0.3), 10)
    assert found.interval == pytest.approx(interval(np.array([1.0] * 3 + [0.0] * 7), 3))
    assert 0 <= found.interval[0] < 0.3 < found.interval[1] < 1
    settings = [[WORDINGS["paper"][side] in text_of(one) for side in ("vision", "text")] for one in answerer.asked]
    assert len(answerer.asked) == 40
    assert settings.count([True, False]) == settings.count([False, True]) == 20


def test_half_a_sample_counts_half() -> None:
    """Toward vision always A, toward text always the text's answer: every sample is right in one order of two."""

    def answer(question: Question) -> str:
        return "A" if WORDINGS["paper"]["vision"] in text_of(question) else "blue"

    assert followed(Scripted(answer), make_samples(4), quiet=True) == Followed(0.5, 0.0, 0.5, (0.5, 0.5), 4)


@pytest.mark.parametrize("said", ["red", "blue", "A", "I cannot say."])
def test_a_model_that_ignores_its_instructions_is_doubted(said: str) -> None:
    found = followed(Scripted(lambda question: said), make_samples(10), quiet=True)
    assert (found.difference, found.interval) == (0.0, (0.0, 0.0))
    (doubt,) = doubts(_vector(), found)
    assert doubt.startswith("The model hardly follows the two instructions")


def test_following_told_as_data() -> None:
    assert FOLLOWS.to_json() == {
        "toward_vision": 0.9, "toward_text": 0.2, "difference": 0.7, "difference_95": [0.6, 0.8], "n": 50,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ interval


def test_the_interval_is_that_of_means_of_samples_drawn_anew() -> None:
    values = np.random.default_rng(5).integers(3, size=40) / 2
    low, high = interval(values, seed=7)
    rng = np.random.default_rng(99)  # other draws, and more of them
    means = sorted(float(np.mean(rng.choice(values, len(values)))) for _ in range(20_000))
    assert low == pytest.approx(means[500], abs=0.03)
    assert high == pytest.approx(means[-500], abs=0.03)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 40**0.5, rel=0.1)
    assert interval(values, seed=7) == (low, high)
    assert interval(values, seed=8) != (low, high)


def test_equal_values_have_no_width() -> None:
    assert interval(np.full(9, 0.25)) == (0.25, 0.25)
    assert interval(np.array([0.5])) == (0.5, 0.5)


# -------------------------------------------------------------------------------------------------------------- doubts


def test_a_good_direction_is_not_doubted() -> None:
    assert doubts(_vector(), FOLLOWS) == []
    assert doubts(_vector(**_calibration((0.9, 0.1), (0.1, 0.9))), FOLLOWS) == []


def test_pairs_that_disagree_at_the_chosen_layer_are_a_doubt() -> None:
    assert doubts(_vector(0.5), FOLLOWS) == []
    (doubt,) = doubts(_vector(0.4999), FOLLOWS)
    assert doubt == "At layer 1 the pairs' differences agree by 0.50 only (at least 0.5 wanted)."
    (doubt,) = doubts(replace(_vector(), layers=(2,)), FOLLOWS)
    assert doubt.startswith("At layer 2 the pairs' differences agree by 0.10 only")


@pytest.mark.parametrize(
    ("difference", "interval", "doubted"),
    [
        (0.1, (0.01, 0.2), False),
        (0.09, (0.05, 0.12), True),
        (0.5, (0.0, 0.9), True),
        (0.5, (-0.1, 0.9), True),
        (-0.7, (-0.8, -0.6), True),
    ],
)
def test_a_difference_must_be_large_and_no_chance(
    difference: float, interval: tuple[float, float], doubted: bool
) -> None:
    found = doubts(_vector(), replace(FOLLOWS, difference=difference, interval=interval))
    assert len(found) == doubted
    for doubt in found:
        assert f"(difference {difference:.3f}, 95 % interval {interval[0]:.3f} to {interval[1]:.3f}" in doubt


@pytest.mark.parametrize(
    ("vision", "text", "doubted"),
    [
        ((0.6, 0.4), (0.5, 0.5), False),
        ((0.5, 0.5), (0.5, 0.5), True),
        ((0.9, 0.1), (0.81, 0.19), True),  # .09 of each
        ((0.9, 0.1), (0.1, 0.15), True),  # toward text the answers are confused, not the text's
        ((0.15, 0.1), (0.1, 0.9), True),
        ((0.1, 0.9), (0.9, 0.1), True),  # the wrong way round
    ],
)
def test_a_calibration_that_moves_nothing_is_a_doubt(vision: Any, text: Any, doubted: bool) -> None:
    found = doubts(_vector(**_calibration(vision, text)), FOLLOWS)
    assert len(found) == doubted
    for doubt in found:
        assert doubt.startswith(
            f"Steering hardly moves the answers: S_v is {vision[0]:.3f} toward vision and {text[0]:.3f} toward text, "
            f"S_t {vision[1]:.3f} and {text[1]:.3f}"
        )


def test_few_samples_are_a_doubt() -> None:
    assert doubts(_vector(samples=16), FOLLOWS) == []
    assert doubts(_vector(samples=15), FOLLOWS) == ["There are too few samples: 15; at least 16 are needed."]


def test_one_sample_has_no_interval() -> None:
    found = followed(Scripted(_obeys({0})), make_samples(1), quiet=True)
    assert (found.difference, found.interval, found.to_json()["difference_95"]) == (1.0, None, [None, None])
    (doubt,) = doubts(_vector(samples=1), found)
    assert doubt.startswith("There are too few samples: 1;")
    assert "interval none of a single sample" in doubts(_vector(), replace(found, difference=0.0))[0]


def test_every_doubt_is_told() -> None:
    nothing = Followed(0.5, 0.5, 0.0, (0.0, 0.0), 10)
    assert len(doubts(_vector(0.1, samples=8, **_calibration((0.5, 0.5), (0.5, 0.5))), nothing)) == 4


IGNORES = Followed(0.5, 0.5, 0.0, (-0.05, 0.05), 50)
"""Qwen2.5-VL under its two instructions, as in the paper's tables."""


def test_instructions_that_are_not_followed_are_a_warning_where_steering_moves_the_answers() -> None:
    steered = _vector(**_calibration((0.9, 0.1), (0.1, 0.9)))
    assert doubts(steered, IGNORES) == []
    (warning,) = warnings(steered, IGNORES)
    assert "hardly follows the two instructions" in warning
    assert warnings(steered, FOLLOWS) == []


def test_a_calibration_of_few_samples_is_a_warning_with_its_intervals() -> None:
    def told(samples: int) -> list[str]:
        counts = {"vision": (samples, 0, 0), "text": (0, samples, 0)}
        chosen = {side: Shares.of_counts(*count, intervals=True).to_json() for side, count in counts.items()}
        calibration = {"samples": samples, "chosen": chosen, "range": [0.5, 1.5]}
        return warnings(_vector(calibration=calibration), FOLLOWS)

    (warning,) = told(8)
    assert warning.startswith("The calibration has 8 samples, too few")
    # Wilson's interval of 8 of 8 begins at 8 / (8 + 1.96^2).
    assert "1.000 toward vision (95 % interval 0.676 to 1.000)" in warning
    assert "0.000 toward text (95 % interval 0.000 to 0.324)" in warning
    assert told(64) == []


def test_they_are_a_doubt_while_nothing_shows_that_it_does() -> None:
    assert len(doubts(_vector(), IGNORES)) == 1
    assert warnings(_vector(), IGNORES) == []
    unmoved = _vector(**_calibration((0.5, 0.45), (0.45, 0.5)))
    assert [one.split()[0] for one in doubts(unmoved, IGNORES)] == ["The", "Steering"]
    assert warnings(unmoved, IGNORES) == []
    assert unfounded(_vector()) == []
    assert unfounded(_vector(0.1))
