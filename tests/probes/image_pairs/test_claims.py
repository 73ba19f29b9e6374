"""The claims that are read from answers."""

from __future__ import annotations

import pytest

from probes.image_pairs.claims import claims, counted, read, structured, yes
from probes.image_pairs.metrics import Claim

THINGS = ("star", "ring", "heart", "dog", "hot dog")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The star changed from red to blue.", [Claim("color", "star", "blue")]),
        ("The star turned blue.", [Claim("color", "star")]),
        ("A red ring was added at the top. The heart moved from the left to the top right.", [
            Claim("add", "ring", "top"), Claim("position", "heart", "top right"),
        ]),
        ("The blue star at the bottom left was removed.", [Claim("remove", "star", "bottom left")]),
        ("The star is missing, and the heart moved.", [Claim("remove", "star"), Claim("position", "heart")]),
        ("1. The hearts changed color\n2. The star is no longer there", [
            Claim("color", "heart"), Claim("remove", "star"),
        ]),
        ("The star has changed its position.", [Claim("position", "star")]),
        ("No, they are different. The star moved to the left.", [Claim("position", "star", "left")]),
        ("No, the star moved to the left.", [Claim("position", "star", "left")]),
        ("Something was removed.", [Claim("remove", None)]),
        ("The ring might have moved to the top.", [Claim("position", "ring", "top", sure=False)]),
        ("Perhaps the heart was removed.", [Claim("remove", "heart", sure=False)]),
        ("The hot dog was removed.", [Claim("remove", "hot dog")]),
        ("The ring above the star was removed.", [Claim("remove", "ring")]),
        ("There is no difference.", []),
        ("Nothing was removed.", []),
        ("No star moved, and the ring was not removed.", []),
        ("The starling moved from here.", [Claim("position", None)]),
        ("The ring is at the left of the star.", []),
    ],
)  # fmt: skip
def test_claims_are_read_off_clauses(answer: str, expected: list[Claim]) -> None:
    assert claims(answer, THINGS) == expected


def test_without_categories_the_types_are_read() -> None:
    assert claims("The star moved.", ()) == [Claim("position")]


@pytest.mark.parametrize(
    ("answer", "expected"), [("Yes, there is.", True), (" no.", False), ("Nobody knows", None), ("It is yes", None)]
)
def test_yes_and_no(answer: str, expected: bool | None) -> None:
    assert yes(answer) is expected


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("There are 3 differences.", 3),
        ("I can see two small differences: the cup and the car.", 2),
        ("4", 4),
        ("Five.", 5),
        ("There is no difference.", 0),
        ("No visible changes between 2 pictures.", 0),
        ("None", 0),
        ("none, they are the same.", 0),
        ("I can see none.", 0),
        ("No differences", 0),
        ("zero", 0),
        ("Zero differences.", 0),
        ("There aren't any differences.", 0),
        ("I do not see any visible changes.", 0),
        ("None of the three changes is large.", 3),
        ("There are 2 pictures.", None),
        ("The 2 cups moved.", None),
        ("Several differences.", None),
    ],
)
def test_the_number_of_differences_that_an_answer_states(answer: str, number: int | None) -> None:
    assert counted(answer) == number


def test_a_list_is_read_as_what_it_says() -> None:
    fenced = 'They differ:\n```json\n[{"type": "Color", "category": "car", "target_color": "red"}]\n```'
    assert read(fenced, ()) == [Claim("color", "car", "red")]
    assert read('{"structured_output": [{"type": "remove", "category": "dog"}, {"category": ""}]}', ()) == [
        Claim("remove", "dog"),
        Claim(None, None),
    ]
    assert read("[]", THINGS) == []
    assert structured("[1, 2]") is None
    assert structured('{"answer": 3}') is None
    assert read("The star turned to red.", THINGS) == claims("The star turned to red.", THINGS) != []
