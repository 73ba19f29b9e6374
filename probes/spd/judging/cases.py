"""Claims labelled by people, as the standard by which judges are rated.

Each case holds one claim, or one pair of claims, so that a label stands for a judgement. The sentences are this project's;
wordings that rules cannot read are among them on purpose.
"""

from __future__ import annotations

from probes.image_pairs.faithfulness import Finding
from probes.image_pairs.metrics import Claim, Label

RED_CAR, NO_DOG, CHAIR = Claim("color", "car", "red"), Claim("remove", "dog"), Claim("position", "chair")

CLAIMS: tuple[tuple[Claim, str, Finding], ...] = (
    (RED_CAR, "The car changed from blue to red.", "faithful"),
    (RED_CAR, "The car turned red.", "faithful"),
    (RED_CAR, "In the second picture the vehicle is red instead of blue.", "faithful"),
    (RED_CAR, "The car changed from blue to green.", "attribute_error"),
    (RED_CAR, "The car's colour turned from silver to yellow.", "attribute_error"),
    (RED_CAR, "The paint of the car is now green.", "attribute_error"),
    (RED_CAR, "The car was removed.", "type_confusion"),
    (RED_CAR, "The car moved to the left.", "type_confusion"),
    (RED_CAR, "The bus changed from blue to red.", "type_category_mismatch"),
    (RED_CAR, "The bench changed its colour.", "type_category_mismatch"),
    (RED_CAR, "A bird was added at the top.", "fabrication"),
    (RED_CAR, "The clock was removed.", "fabrication"),
    (NO_DOG, "The dog was removed.", "faithful"),
    (NO_DOG, "The dog is no longer in the picture.", "faithful"),
    (NO_DOG, "You cannot see the dog any more.", "faithful"),
    (NO_DOG, "The dog disappeared.", "faithful"),
    (NO_DOG, "The dog moved to the right.", "type_confusion"),
    (NO_DOG, "The dog turned black.", "type_confusion"),
    (NO_DOG, "The cat is missing.", "type_category_mismatch"),
    (NO_DOG, "The person has been removed.", "type_category_mismatch"),
    (NO_DOG, "The umbrella changed from red to blue.", "fabrication"),
    (NO_DOG, "There is a new kite in the sky.", "fabrication"),
    (CHAIR, "The chair moved to the left.", "faithful"),
    (CHAIR, "The chair changed its place.", "faithful"),
    (CHAIR, "The chair stands somewhere else now.", "faithful"),
    (CHAIR, "The chair is gone.", "type_confusion"),
    (CHAIR, "The chair changed from brown to white.", "type_confusion"),
    (CHAIR, "The couch moved to the right.", "type_category_mismatch"),
    (CHAIR, "The vase was shifted.", "type_category_mismatch"),
    (CHAIR, "The laptop was removed.", "fabrication"),
)
"""The true difference, the claim, and the finding on the claim."""

PAIRED: tuple[tuple[str, str, Label], ...] = (
    ("The car changed from blue to red.", "The car turned to red.", "consistent"),
    ("The dog was removed.", "The dog is missing.", "consistent"),
    ("The dog was removed.", "The dog cannot be seen any more.", "consistent"),
    ("The chair moved to the left.", "The chair moved to the left.", "consistent"),
    ("The chair moved.", "The chair moved to the left.", "consistent"),
    ("The cup changed its colour.", "The cup turned to green.", "consistent"),
    ("The car changed from blue to red.", "The car changed from blue to green.", "contradictory"),
    ("The dog was removed.", "The dog moved to the right.", "contradictory"),
    ("The chair moved to the left.", "The chair moved to the right.", "contradictory"),
    ("The chair moved to the left.", "The chair stands on the right now.", "contradictory"),
    ("The clock is gone.", "The clock turned to white.", "contradictory"),
    ("The bus turned to yellow.", "The bus was removed.", "contradictory"),
    ("The car may have changed from blue to red.", "The car turned to red.", "ambiguous"),
    ("The dog was perhaps removed.", "The dog is missing.", "ambiguous"),
    ("Possibly the cup moved to the top.", "The cup moved to the top.", "ambiguous"),
    ("The chair seems to be somewhere else.", "The chair moved to the left.", "ambiguous"),
    ("The vase might be gone.", "The vase was removed.", "ambiguous"),
    ("Something moved to the left.", "The chair moved to the left.", "ambiguous"),
)
"""The claim of the answer to "same?", that of the answer to "different?", and their agreement."""
