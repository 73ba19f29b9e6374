"""SPD-Faith's metrics, worked out by hand from the paper's equations and from what the authors' scripts compute."""

from __future__ import annotations

import itertools

import pytest

from probes.image_pairs.metrics import Claim, Label, PairScores, compare, cross, score

CAR, DOG, CHAIR = Claim("color", "car", "red"), Claim("remove", "dog"), Claim("color", "chair", "blue")


def pair(true: list[Claim], claimed: list[Claim], **more: object) -> PairScores:
    return PairScores(true, claimed, **more)  # type: ignore[arg-type]


def test_quantity_in_its_four_definitions() -> None:
    # Two of three: the paper's own example of DS. Four of two. None of one. One of none. None of none.
    scores = score(
        [
            pair([CAR, DOG, CHAIR], [CAR, DOG]),
            pair([CAR, DOG], [CAR, DOG, DOG, DOG]),
            pair([CAR], []),
            pair([], [DOG]),
            pair([], []),
        ]
    )
    assert scores["dqr_exact"] == pytest.approx(1 / 5)
    assert scores["ds_tolerance"] == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert scores["dqr_ratio"] == pytest.approx((2 / 3 + 4 / 2 + 0) / 3)
    assert scores["ds_detect"] == pytest.approx(2 / 3)
    assert scores["false_alarms"] == pytest.approx(1 / 2)


def test_a_stated_number_counts_in_place_of_what_is_described() -> None:
    scores = score([pair([CAR, DOG, CHAIR], [CAR], count=3)])
    assert (scores["dqr_exact"], scores["ds_tolerance"], scores["dqr_ratio"]) == (1, 1, 1)
    assert scores["color_recall"] == pytest.approx(1 / 2)  # of what is described


def test_types_are_multisets_and_others_than_the_three_do_not_count() -> None:
    claimed = [Claim("color", "car"), Claim("color", "car"), Claim("remove", "cat"), Claim("add", "tree")]
    scores = score([pair([CAR, DOG, CHAIR], claimed), pair([Claim("position", "cup")], [Claim("color", "cup")])])
    # color: 2 of 2 claimed and true, then 1 claimed of none; remove: 1 of 1; position: none of 1 true
    assert (scores["color_precision"], scores["color_recall"]) == (pytest.approx(2 / 3), 1)
    assert (scores["remove_precision"], scores["remove_recall"]) == (1, 1)
    assert (scores["position_precision"], scores["position_recall"]) == (None, 0)
    assert scores["tf1"] == pytest.approx(2 * 3 / (4 + 4))


def test_one_claim_of_a_type_does_not_find_two() -> None:
    scores = score([pair([CAR, CHAIR], [Claim("color", "car")])])
    assert (scores["color_precision"], scores["color_recall"]) == (1, 1 / 2)
    assert scores["tf1"] == pytest.approx(2 / 3)


def test_categories_as_multisets_and_as_the_released_code_counts_them() -> None:
    claimed = [Claim("color", "car"), Claim("color", "car"), Claim("remove", "cat"), Claim("add", "tree")]
    scores = score([pair([CAR, DOG, CHAIR], claimed)])
    assert (scores["category_precision"], scores["category_recall"]) == (1 / 4, pytest.approx(1 / 3))
    assert scores["cf1"] == pytest.approx(2 * 1 / (4 + 3))
    # There both cars count: precision 2/4, recall 2/3.
    assert scores["cf1_released"] == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_a_claim_without_a_category_is_no_claim_of_one() -> None:
    scores = score([pair([DOG], [Claim("remove")])])
    assert (scores["tf1"], scores["category_precision"], scores["category_recall"], scores["cf1"]) == (1, None, 0, 0)


def test_metrics_without_anything_to_measure_are_none() -> None:
    assert set(score([]).values()) == {None}
    scores = score([pair([], [])])
    assert [name for name, value in scores.items() if value is not None] == [
        "dqr_exact", "false_alarms", "cr_all", "cr_pairs", "yes_no_consistency", "contradictions", "yes_same",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ([CAR, DOG], [DOG, CAR], ["consistent", "consistent"]),
        ([CAR], [Claim("color", "car", "green")], ["contradictory"]),  # it cannot have become both
        ([CAR], [Claim("color", "car")], ["consistent"]),  # the second does not say what it became
        ([CAR], [Claim("remove", "car")], ["contradictory"]),  # what is gone has not changed its colour
        ([CAR], [Claim("position", "car", "left")], ["ambiguous", "ambiguous"]),  # both may be true
        ([CAR], [DOG], ["ambiguous", "ambiguous"]),  # neither answer speaks of the other's difference
        ([CAR, DOG], [DOG], ["consistent", "ambiguous"]),
        ([CAR], [Claim("color", None)], ["ambiguous"]),  # vague
        ([CAR], [Claim("color", "car", "red", sure=False)], ["ambiguous"]),
        ([CAR, Claim("color", "car", "green")], [Claim("color", "car", "green")], ["consistent", "ambiguous"]),
        ([CAR], [], []),
        ([], [], []),
    ],
)
def test_claims_of_two_answers_are_compared(first: list[Claim], second: list[Claim], labels: list[Label]) -> None:
    assert compare(first, second) == labels
    assert sorted(compare(second, first)) == sorted(labels)


def test_cr_is_the_mean_over_claims_and_then_over_pairs() -> None:
    three: list[Label] = ["consistent", "contradictory", "ambiguous"]
    scores = score([pair([], [], labels=three), pair([], [], labels=["consistent"]), pair([], [])])
    assert scores["cr"] == pytest.approx(((1 - 1 + 0.5) / 3 + 1) / 2)  # not (1 - 1 + .5 + 1) / 4
    assert scores["cr_pairs"] == pytest.approx(2 / 3)


def test_cr_leaves_the_yes_and_no_out_which_are_another_number() -> None:
    alike = pair([CAR], [], same=True, different=True, labels=["consistent"])
    unlike = pair([CAR], [], same=False, different=True, labels=["contradictory"])
    neither = pair([CAR], [], same=None, different=True)
    scores = score([alike, unlike, neither])
    assert scores["cr"] == 0
    assert scores["yes_no_consistency"] == pytest.approx((-1 + 1 + 0.5) / 3)
    assert scores["contradictions"] == pytest.approx(1 / 3)
    assert scores["yes_same"] == pytest.approx(1 / 3)


def test_answering_no_twice_is_inconsistent_but_no_contradiction() -> None:
    scores = score([pair([], [], same=False, different=False)])
    assert (scores["yes_no_consistency"], scores["contradictions"]) == (-1, 0)


def test_labels_do_not_depend_on_the_order_of_the_claims() -> None:
    vague, red, blue = (Claim("color", "car", attribute) for attribute in (None, "red", "blue"))
    for first in itertools.permutations([vague, red]):
        for second in itertools.permutations([red, blue]):
            assert compare(first, second) == ["consistent", "consistent"]
            assert compare(second, first) == ["consistent", "consistent"]


def test_cr_of_all_pairs_counts_one_without_as_nothing_and_clauses_meet_all_others() -> None:
    """By hand: two claims against two others, of which one is the same and one contradicts; three are of other things."""
    blue, red, gone = Claim("color", "star", "blue"), Claim("color", "star", "red"), Claim("remove", "ring")
    first, second = [blue, gone], [red, gone]
    crossed = cross(first, second)
    assert sorted(crossed) == ["ambiguous", "ambiguous", "consistent", "contradictory"]
    pair = PairScores((blue,), first, labels=compare(first, second), crossed=crossed)
    measured = score([pair, PairScores((blue,), ())])
    assert measured["cr"] == 0  # one alike, one contradicts
    assert measured["cr_clauses"] == (1 - 1 + 0.5 + 0.5) / 4
    alike = PairScores((blue,), first, labels=compare(first, first), crossed=cross(first, first))
    measured = score([alike, PairScores((blue,), ())])
    assert (measured["cr"], measured["cr_all"], measured["cr_pairs"]) == (1, 0.5, 0.5)
    assert cross([Claim("color", "star", "blue", sure=False)], [blue]) == ["ambiguous"]
    assert cross([], [blue]) == []
