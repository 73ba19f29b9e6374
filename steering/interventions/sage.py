"""SAGE decoding (SPD-Faith Bench paper, section 5.1): stages that can be asked for alone or together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from steering.interventions import generate, see, think
from steering.interventions.generate import Generate, Mask
from steering.interventions.see import See
from steering.interventions.think import Think


@dataclass(frozen=True)
class SageReadings:
    """What the stages measured in one sequence. see: (tokens, 4) as `SeeSlots.steps`. think: (layers, 2) as
    `ThinkSlots.measured`, over `tokens` tokens of prompt and answer. masks: what was occluded. changed: how many tokens
    would have been others without the contrast, chosen greedily."""

    see: torch.Tensor
    think: torch.Tensor
    tokens: int
    masks: tuple[Mask, ...]
    changed: int


@dataclass(frozen=True)
class Sage:
    """The stages of one request; None is off."""

    see: See | None = None
    think: Think | None = None
    generate: Generate | None = None

    def report(self, readings: SageReadings) -> dict[str, Any]:
        """What each stage did, None where it is off."""
        return {
            "see": None if self.see is None else see.report(self.see, readings.see),
            "think": None if self.think is None else think.report(readings.think, readings.tokens),
            "generate": generate.report(readings.masks, readings.changed) if readings.masks else None,
        }
