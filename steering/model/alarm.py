"""The alarm of a model, which tells from a sum of readouts that an answer may be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("centre", "scale", "weight")


@dataclass(frozen=True)
class Alarm:
    """A linear score of readouts and the threshold above which an alarm is raised.

    score = bias + the sum over `numbers` of weight * (x - centre) / scale, with a missing x at its centre: the log-odds that
    an answer is wrong. The alarm is raised above `threshold`.

    numbers: by a readout's scalar, its `PARTS`. Both were fitted on `answers` of the model. `raised` is measured on other
    answers: the share of the `right` and of the `wrong` ones on which it is raised, and how often the wrong one of a right
    and a wrong answer has the greater score, over all pairs (`area`) and over pairs with similar questions (`alike`; .5 is
    chance), each as [value, low, high] with the 95 % interval, or None without data.
    """

    numbers: Mapping[str, Mapping[str, float]]
    bias: float
    threshold: float
    answers: int
    raised: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Alarm:
        """Build an alarm from JSON; raise ValueError or TypeError where it is invalid."""
        alarm = cls(**content)
        weights = [entry[part] for entry in alarm.numbers.values() for part in PARTS if entry.keys() == set(PARTS)]
        numbers = (*weights, alarm.bias, alarm.threshold)
        is_complete = len(weights) == len(PARTS) * len(alarm.numbers) > 0
        if not is_complete or not all(isinstance(x, float) and math.isfinite(x) for x in numbers):
            raise ValueError("must hold an alarm's numbers with centre, scale and weight, its bias and its threshold")
        if any(entry["scale"] <= 0 for entry in alarm.numbers.values()):
            raise ValueError("must hold an alarm's scales, which are above 0")
        return alarm

    def score(self, numbers: Mapping[str, float | None]) -> float:
        """Return the log-odds that an answer with these numbers is wrong."""
        total = self.bias
        for name, entry in self.numbers.items():
            value = numbers.get(name)
            if value is not None and math.isfinite(value):
                total += entry["weight"] * (value - entry["centre"]) / entry["scale"]
        return total
