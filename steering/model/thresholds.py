"""Thresholds above or below which a model's map statistics become flags; `readouts.flags` explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLAGS = ("perceptual_blindness", "dissociation")


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of a model's map flags, chosen on `answers` of it.

    attention, activation: the least share of the map in its strongest fifth with which it is concentrated; agreement: the
    least correlation with which both maps agree.

    `raised` is measured on other answers, by flag: the share of the `right` and of the `wrong` ones on which it is raised;
    how often it is raised on the wrong one of a right and a wrong answer to similar questions (`area`, .5 is chance); each
    as [value, low, high] with the 95 % interval; and whether the last is significantly above chance (`separates`).
    """

    attention: float
    activation: float
    agreement: float
    answers: int
    raised: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Thresholds:
        """Build thresholds from JSON; raise ValueError or TypeError where they are invalid."""
        thresholds = cls(**content)
        numbers = (thresholds.attention, thresholds.activation, thresholds.agreement)
        if not all(isinstance(x, float) and math.isfinite(x) for x in numbers) or set(thresholds.raised) != set(FLAGS):
            raise ValueError("must hold three thresholds, and how often each flag is raised")
        return thresholds

    def flags(self, attention: float, activation: float, agreement: float) -> dict[str, bool]:
        """Return the flags of an answer's maps.

        perceptual_blindness: neither map is concentrated. dissociation: attention is, and the activation map does not agree
        with it.
        """
        looks = attention >= self.attention
        return {
            "perceptual_blindness": not looks and activation < self.activation,
            "dissociation": looks and agreement < self.agreement,
        }
