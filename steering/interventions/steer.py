"""Modality-preference steering: a scaled direction added to the residual stream (modality-preference paper, section 4).

h_l[t] <- h_l[t] + c * w_l * v_l at the chosen layers l for the chosen tokens t; c > 0 toward text, c < 0 toward vision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from steering.errors import RequestError
from steering.residual import IMAGE, TEXT
from steering.vectors import SteeringVector

TOKENS = ("all", "prompt", "generated", "image", "text")
"""Which tokens a vector is added to; "image" and "text" are the image and the other tokens of the prompt."""

TOWARD = {"vision": -1.0, "text": 1.0}


@dataclass(frozen=True)
class Steer:
    """One vector in one request. `scale` is the signed coefficient c; `layers` None means the vector's own."""

    vector: SteeringVector
    scale: float
    layers: tuple[int, ...] | None = None
    tokens: str = "all"
    toward: str | None = None
    auto: Mapping[str, float] | None = None  # what was measured where the way was found and not asked for

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise RequestError(f"'steering.scale' must be a finite number; got {self.scale}.", param="steering.scale")
        if self.tokens not in TOKENS:
            raise RequestError(
                f"'steering.apply.tokens' must be one of {', '.join(TOKENS)}; got {self.tokens!r}.",
                param="steering.apply.tokens",
            )
        count = len(self.vector.direction)
        if self.layers is not None and (not self.layers or any(not 0 <= layer < count for layer in self.layers)):
            raise RequestError(
                f"'steering.layers' must be layer numbers from 0 to {count - 1}; got {list(self.layers)}.",
                param="steering.layers",
            )

    @classmethod
    def to(cls, vector: SteeringVector, toward: str, strength: float = 1.0, **options: Any) -> Steer:
        """Push toward "vision" or "text" with a strength >= 0 (1.0 as published, 0 exactly off)."""
        if toward not in TOWARD:
            raise RequestError(
                f"'steering.toward' must be one of {', '.join(TOWARD)}; got {toward!r}.", param="steering.toward"
            )
        if not (math.isfinite(strength) and strength >= 0):
            raise RequestError(
                f"'steering.strength' must be a finite number of at least 0; got {strength}.", param="steering.strength"
            )
        return cls(vector, TOWARD[toward] * strength, toward=toward, **options)

    @property
    def delta(self) -> torch.Tensor:
        """(layers, d) float32: what is added to a chosen token."""
        return self.vector.delta(self.scale, self.layers)

    @property
    def classes(self) -> tuple[bool, bool]:
        """Whether the prompt's text and its image tokens are touched."""
        return self.tokens in ("all", "prompt", "text"), self.tokens in ("all", "prompt", "image")

    @property
    def generated(self) -> bool:
        """Whether generated tokens are touched."""
        return self.tokens in ("all", "generated")


class Touched(NamedTuple):
    """How many tokens of each kind a sequence has run through the model."""

    text: int
    image: int
    generated: int


def prompt_delta(steers: Sequence[Steer]) -> dict[int, torch.Tensor]:
    """For each steered layer (2, d): what is added to TEXT and to IMAGE tokens of the prompt, all vectors together.

    A layer where only generated tokens are touched is present with zeros, so that its |h| is measured for the dose.
    """
    out: dict[int, torch.Tensor] = {}
    for steer in steers:
        delta = steer.delta
        for layer in steer.layers or steer.vector.layers:
            row = out.setdefault(layer, torch.zeros(2, delta.shape[1]))
            for kind, touched in zip((TEXT, IMAGE), steer.classes, strict=True):
                if touched:
                    row[kind] += delta[layer]
    return out


def generated_delta(steers: Sequence[Steer], layers: int, width: int) -> torch.Tensor:
    """(layers, d): what is added to every generated token, all vectors together."""
    return sum((steer.delta for steer in steers if steer.generated), torch.zeros(layers, width))


def applied(steer: Steer, norms: dict[int, torch.Tensor], touched: Touched) -> dict[str, Any]:
    """The report of what was done. norms: per steered layer (2,), summed |h| over TEXT and IMAGE prompt tokens.

    The dose is |added| / |h|, averaged over the touched prompt tokens and the layers; where only generated tokens are
    touched, the prompt's text tokens stand for them.
    """
    layers = steer.layers or steer.vector.layers
    classes = steer.classes if any(steer.classes) else (True, False)
    counts = (touched.text * classes[TEXT], touched.image * classes[IMAGE])
    mask = torch.tensor(classes, dtype=torch.float32)
    doses = [
        float(steer.delta[layer].norm() * sum(counts) / (norms[layer].cpu() * mask).sum())
        for layer in layers
        if sum(counts)
    ]
    warning = None
    if (known := steer.vector.calibrated_range) is not None and abs(steer.scale) > known[1]:
        warning = f"strength {abs(steer.scale):g} is beyond the calibrated range {known[0]:g} to {known[1]:g}"
    return {
        "name": steer.vector.name,
        "toward": steer.toward,
        "strength": abs(steer.scale),
        "scale": steer.scale,
        "layers": list(layers),
        "apply": {"tokens": steer.tokens},
        "tokens": touched.text * steer.classes[TEXT]
        + touched.image * steer.classes[IMAGE]
        + touched.generated * steer.generated,
        "dose": sum(doses) / len(doses) if doses else None,
        "warning": warning,
        **({} if steer.auto is None else {"auto": dict(steer.auto)}),
    }
