"""The decay readout shows how attention to the images fades as an answer goes on (SPD-Faith Bench paper, section 4.2)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from steering.measures import nan_to_none
from steering.prompt.spans import PARTITIONS
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, ReadoutOption, Scalar
from steering.protocol.signals import Signal
from steering.recorders.attention import NAME, Attention

SPANS = ReadoutOption.word(
    "spans",
    PARTITIONS,
    "The system and user text of the decay: all of the prompt, or the messages' texts alone.",
)
"""The whole prompt, template included, or the messages' texts; see `prompt.spans.PARTITIONS`."""
PARTS = ("vision", "system", "user")
BY_LAYER = "decay_layers"


def slope(values: torch.Tensor) -> float | None:
    """Return the slope of the least-squares line through values (steps,) over their index; None for fewer than two."""
    numbers = values.double().numpy()  # numpy's small operations take a tenth of torch's time
    (steps,) = np.isfinite(numbers).nonzero()
    if len(steps) < 2:
        return None
    apart = steps - steps.mean()
    return float(apart @ (numbers[steps] - numbers[steps].mean()) / (apart @ apart))


class DecayReadout(Readout):
    """Shares of attention at each generated token, mean over layers, and by layer where `decay_layers` is requested.

    `slope` is the change of vision's share per token (least squares).
    """

    name = "decay"
    cheap = True
    options = (SPANS,)
    scalars: ClassVar[dict[str, type]] = {"decay_slope": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "decay_slope": Quantity(
            "Change of the image's share of attention with each token of the answer",
            unit="1/token", low=-1.0, high=1.0,
            buckets=(-0.1, -0.03, -0.01, -0.003, -0.001, -0.0003, 0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.DECAY})

    def asked_beside(self, options: Diagnose) -> bool:
        return BY_LAYER in options.include

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        attention: Attention = answer.taken[NAME]
        shares = attention.decay  # (steps, layers, 3)
        mean = shares.nanmean(1)
        out: dict[str, Any] = dict(zip(PARTS, nan_to_none(mean.T), strict=True))
        out["spans"] = answer.options[SPANS]
        out["slope"] = slope(mean[:, 0]) if answer.images else None
        if BY_LAYER in answer.options.include:
            out["by_layer"] = dict(zip(PARTS, nan_to_none(shares.permute(2, 0, 1)), strict=True))
        return out

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {"decay_slope": report["slope"]}


class DecayLayersReadout(Readout):
    """Adds `by_layer` to `decay`; it is no key of its own."""

    name = BY_LAYER
    part_of = DecayReadout.name

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.DECAY})

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        return len(PARTS) * layers * tokens

    def read(self, answer: FinishedAnswer) -> None:
        return None
