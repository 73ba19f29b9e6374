"""Two failures that maps betray: blindness to the picture, and an answer that does not rest on what is looked at.

The SAGE paper (section 4.1, figure 6) describes both by examples and gives no measure. Here a map is as concentrated as the
share of it that the fifth of the patches holds where it is strongest (a flat map: a fifth), and two maps agree as their
values correlate over the patches. Where these numbers become flags is measured for each model (`Thresholds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

TOP = 0.2
FLAGS = ("perceptual_blindness", "dissociation")


@dataclass(frozen=True)
class Thresholds:
    """Where a model's numbers become flags, chosen on `answers` of it. attention, activation: the least share of the map in
    its strongest fifth with which it is concentrated; agreement: the least correlation with which both maps agree.

    `raised` tells of other answers, by flag, on which share of the `right` and of the `wrong` ones it is raised, of a right
    and a wrong answer to alike questions how often it is the wrong one (`area`, .5 is chance), each as [value, low, high]
    with the 95 % interval, and whether the last is above chance beyond doubt (`separates`).
    """

    attention: float
    activation: float
    agreement: float
    answers: int
    raised: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Thresholds:
        """From JSON; raises ValueError or TypeError for what is none."""
        found = cls(**content)
        numbers = (found.attention, found.activation, found.agreement)
        if not all(isinstance(x, float) and math.isfinite(x) for x in numbers) or set(found.raised) != set(FLAGS):
            raise ValueError("must hold three thresholds, and how often each flag is raised")
        return found

    def flags(self, attention: float, activation: float, agreement: float) -> dict[str, bool]:
        """perceptual_blindness: neither map is concentrated. dissociation: attention is, and the activation map does not
        agree with it."""
        looks = attention >= self.attention
        return {
            "perceptual_blindness": not looks and activation < self.activation,
            "dissociation": looks and agreement < self.agreement,
        }


def numbers(attention: torch.Tensor, activation: torch.Tensor) -> dict[str, float | None]:
    """The concentration of both maps, the overlap of their strongest fifths as a share of either, and their correlation.

    attention, activation: (patches,) of all images together, not negative. None where a map is zero everywhere, the
    correlation also where one is flat.
    """
    count = math.ceil(TOP * len(attention))
    looked, said = (_top_share(values, count) for values in (attention, activation))
    overlap = agreement = None
    if looked is not None and said is not None:
        overlap = len(_top(attention, count) & _top(activation, count)) / count
        both = torch.stack([attention, activation]).double()
        both = both - both.mean(1, keepdim=True)
        sizes = both.norm(dim=1)
        if bool((sizes > 1e-9 * torch.stack([attention, activation]).double().norm(dim=1)).all()):
            agreement = float((both[0] @ both[1]) / sizes.prod())
    return {"attention": looked, "activation": said, "overlap": overlap, "agreement": agreement}


def flags(attention: torch.Tensor, activation: torch.Tensor, thresholds: Thresholds | None) -> dict[str, Any]:
    """The `flags` readout. Its flags are None without thresholds, where a number does not exist, and where there are too few
    patches to tell."""
    found = numbers(attention, activation)
    known = [found[name] for name in ("attention", "activation", "agreement")]
    raised: Mapping[str, bool | None] = dict.fromkeys(FLAGS)
    if thresholds is not None and None not in known and len(attention) > 2 * math.ceil(TOP * len(attention)):
        raised = thresholds.flags(*(value for value in known if value is not None))
    content = asdict(thresholds) if thresholds is not None else {}
    compared = {name: content.get(name) for name in ("attention", "activation", "agreement")}
    return {
        **raised,
        "concentration": found,
        "thresholds": {"top": TOP, **compared},
        "calibration": {name: content[name] for name in ("answers", "raised")} if content else None,
    }


def _top(values: torch.Tensor, count: int) -> set[int]:
    return set(values.topk(count).indices.tolist())


def _top_share(values: torch.Tensor, count: int) -> float | None:
    total = float(values.sum())
    return float(values.topk(count).values.sum()) / total if total > 0 else None
