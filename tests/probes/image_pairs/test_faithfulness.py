"""Claims beside the truth, worked out by hand from the paper's error categories."""

from __future__ import annotations

from probes.image_pairs.faithfulness import Faithfulness, findings
from probes.image_pairs.metrics import Claim

CAR, DOG, CUP = Claim("color", "car", "red"), Claim("remove", "dog"), Claim("position", "cup")


def test_each_category_by_the_papers_examples() -> None:
    assert findings([CAR, Claim("remove", "dog", "left")], [DOG, CAR]) == ["faithful", "faithful"]
    assert findings([Claim("color", "car", "blue")], [CAR]) == ["attribute_error"]
    assert findings([Claim("color", "dog")], [DOG]) == ["type_confusion"]
    assert findings([Claim("remove", "person")], [DOG]) == ["type_category_mismatch"]
    assert findings([Claim("add", "tree"), Claim("color", "tree")], [DOG]) == ["fabrication", "fabrication"]
    assert findings([Claim(None, None)], [DOG]) == ["fabrication"]


def test_a_true_difference_stands_for_one_claim_and_better_matches_come_first() -> None:
    # The second claim is the car's; what is left for the first is nothing of its type or category.
    assert findings([Claim("color", "car"), CAR, CAR], [CAR]) == ["faithful", "fabrication", "fabrication"]
    assert findings([Claim("color", "car", "blue"), CAR], [CAR]) == ["fabrication", "faithful"]
    # The car is confused with something removed, so that no change of colour is left that the cat's could be.
    assert findings([Claim("color", "cat"), Claim("remove", "car")], [CAR, DOG]) == ["fabrication", "type_confusion"]


def test_the_share_of_faithful_claims_and_another_number_than_there_are() -> None:
    result = Faithfulness.of(findings([CAR, Claim("color", "dog"), Claim("add", "tree")], [CAR, DOG, CUP]), 3)
    assert (result.claims, result.faithful, result.quantity_error) == (3, 1, False)
    assert result.errors == {"type_confusion": 1, "fabrication": 1}
    assert Faithfulness.of(["faithful"], 2).quantity_error
