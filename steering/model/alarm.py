"""What tells of a model's answers that they may be wrong: a sum of numbers that are read beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("centre", "scale", "weight")


@dataclass(frozen=True)
class Alarm:
    """score = bias + the sum over `numbers` of weight * (x - centre) / scale, with x at its centre where it does not exist:
    the log-odds that an answer is wrong. The alarm is raised above `threshold`.

    numbers: by a readout's scalar, its `PARTS`. Both were fitted on `answers` of the model. `raised` tells of other answers
    on which share of the `right` and of the `wrong` ones it is raised, and of a right and a wrong answer how often the
    latter has the greater score, of all (`area`) and of alike questions (`alike`; .5 is chance), each as [value, low, high]
    with the 95 % interval, or None where there was nothing to tell.
    """

    numbers: Mapping[str, Mapping[str, float]]
    bias: float
    threshold: float
    answers: int
    raised: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Alarm:
        """From JSON; raises ValueError or TypeError for what is none."""
        found = cls(**content)
        weights = [one[part] for one in found.numbers.values() for part in PARTS if one.keys() == set(PARTS)]
        numbers = (*weights, found.bias, found.threshold)
        whole = len(weights) == len(PARTS) * len(found.numbers) > 0
        if not whole or not all(isinstance(x, float) and math.isfinite(x) for x in numbers):
            raise ValueError("must hold an alarm's numbers with centre, scale and weight, its bias and its threshold")
        if any(one["scale"] <= 0 for one in found.numbers.values()):
            raise ValueError("must hold an alarm's scales, which are above 0")
        return found

    def score(self, numbers: Mapping[str, float | None]) -> float:
        """The log-odds that an answer with these numbers is wrong."""
        total = self.bias
        for name, one in self.numbers.items():
            value = numbers.get(name)
            if value is not None and math.isfinite(value):
                total += one["weight"] * (value - one["centre"]) / one["scale"]
        return total
