"""Modality-preference steering: a scaled direction added to the residual stream (modality-preference paper, section 4).

h_l[t] <- h_l[t] + c * w_l * v_l at the chosen layers l for the chosen tokens t; c > 0 toward text, c < 0 toward vision; the
other way around for a vector that was negated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steering.errors import RequestError
from steering.residual import IMAGE, TEXT
from steering.spans import FIRST_IMAGE
from steering.vectors import PREFERENCE, SteeringVector

TOKENS = ("all", "prompt", "generated", "image", "text")
"""Which tokens a vector is added to; "image" and "text" are the image and the other tokens of the prompt. Beside these,
"image:2" is the second image of the prompt alone."""

_ONE_IMAGE = re.compile(r"image:([1-9][0-9]{0,3})")

TOWARD = ("vision", "text")


@dataclass(frozen=True)
class Steer:
    """One vector in one request. `scale` is the signed coefficient c; `layers` None means the vector's own."""

    vector: SteeringVector
    scale: float
    layers: tuple[int, ...] | None = None
    tokens: str = "all"
    toward: str | None = None
    auto: Mapping[str, Any] | None = None  # what was measured where the way was found and not asked for

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise RequestError(f"'steering.scale' must be a finite number; got {self.scale}.", param="steering.scale")
        if self.tokens not in TOKENS and self.image is None:
            raise RequestError(
                f"'steering.apply.tokens' must be one of {', '.join(TOKENS)}, or image:1, image:2 and so on for one image; "
                f"got {self.tokens[:64]!r}.",
                param="steering.apply.tokens",
            )
        count = len(self.vector.direction)
        if self.layers is not None and (not self.layers or any(not 0 <= layer < count for layer in self.layers)):
            raise RequestError(
                f"'steering.layers' must be layer numbers from 0 to {count - 1}; got {list(self.layers)}.",
                param="steering.layers",
            )
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise RequestError(
                f"'steering.layers' must not name a layer twice; got {list(self.layers)}.", param="steering.layers"
            )

    @classmethod
    def to(cls, vector: SteeringVector, toward: str, strength: float = 1.0, **options: Any) -> Steer:
        """Push toward "vision" or "text" with a strength >= 0: 0 is exactly off, 1.0 the vector's own weight, that is the
        calibrated dose, or the published weight of a vector that was not calibrated (see `published`). The vector must be
        a modality preference; one that was negated is turned back (see `SteeringVector.positive`)."""
        if toward not in TOWARD:
            raise RequestError(
                f"'steering.toward' must be one of {', '.join(TOWARD)}; got {toward!r}.", param="steering.toward"
            )
        if not (math.isfinite(strength) and strength >= 0):
            raise RequestError(
                f"'steering.strength' must be a finite number of at least 0; got {strength}.", param="steering.strength"
            )
        if vector.positive is None:
            raise RequestError(
                f"'steering.toward' needs a vector of kind {PREFERENCE!r}, and {vector.name!r} is {vector.kind[:64]!r}: "
                "which modality it pushes toward is not known. Give it a signed 'scale' in 'steering.vectors'.",
                param="steering.vector",
                code="not_a_preference",
            )
        return cls(vector, strength if toward == vector.positive else -strength, toward=toward, **options)

    @property
    def delta(self) -> torch.Tensor:
        """(layers, d) float32: what is added to a chosen token."""
        return self.vector.delta(self.scale, self.layers)

    @property
    def way(self) -> str | None:
        """The modality that it really pushes toward, however it was asked for; None where it does nothing, or the vector is
        no modality preference."""
        if self.scale == 0 or self.vector.positive is None:
            return None
        return next(way for way in TOWARD if (way == self.vector.positive) == (self.scale > 0))

    @property
    def touched_layers(self) -> tuple[int, ...]:
        return self.layers or self.vector.layers

    @property
    def published(self) -> float | None:
        """The strength in published units; None where the vector's published weight is not known."""
        unit = self.vector.published
        return None if unit is None else abs(self.scale) * unit

    @property
    def settings(self) -> dict[str, Any]:
        """How every report on it begins."""
        return {
            "name": self.vector.name,
            "toward": self.toward,
            "strength": abs(self.scale),
            "published": self.published,
            "scale": self.scale,
            "layers": list(self.touched_layers),
            "apply": {"tokens": self.tokens},
        }

    @property
    def image(self) -> int | None:
        """The number of the one image that is touched, counted from 1; None for the other choices of tokens."""
        found = _ONE_IMAGE.fullmatch(self.tokens)
        return int(found[1]) if found else None

    def classes(self, count: int) -> torch.Tensor:
        """(count,) float32: 1 for each class of prompt tokens (see `prompt_classes`) that is touched."""
        out = torch.zeros(count)
        if self.image is not None and self.image < count:  # the prompt of a contrast may lack the images
            out[self.image] = 1.0
        if self.tokens in ("all", "prompt", "text"):
            out[TEXT] = 1.0
        if self.tokens in ("all", "prompt", "image"):
            out[IMAGE:] = 1.0
        return out

    @property
    def warning(self) -> str | None:
        """What is to be said of a strength that calibration did not measure."""
        known = self.vector.calibrated_range
        if known is None or abs(self.scale) <= known[1]:
            return None
        return f"strength {abs(self.scale):g} is beyond the calibrated range {known[0]:g} to {known[1]:g}"

    @property
    def generated(self) -> bool:
        """Whether generated tokens are touched."""
        return self.tokens in ("all", "generated")


def class_count(steers: Iterable[Steer], images: int) -> int:
    """How many classes the tokens of prompts with up to `images` images fall into: the text and the images, told apart
    only where a vector touches one of them."""
    return max(1 + images if any(steer.image is not None for steer in steers) else 2, 2)


def prompt_classes(spans: torch.Tensor, count: int) -> torch.Tensor:
    """(n, count) float32 one-hot: TEXT, then image by image, or one class for all of them where count is 2."""
    numbers = (spans - FIRST_IMAGE + 1).clamp(TEXT, count - 1)
    return (numbers[:, None] == torch.arange(count)).float()


def prompt_delta(steers: Sequence[Steer], count: int) -> dict[int, torch.Tensor]:
    """For each steered layer (count, d): what is added to each class of prompt tokens, all vectors together.

    A layer where only generated tokens are touched is present with zeros, so that its |h| is measured for the dose.
    """
    out: dict[int, torch.Tensor] = {}
    for steer in steers:
        delta, classes = steer.delta, steer.classes(count)
        for layer in steer.touched_layers:
            row = out.setdefault(layer, torch.zeros(count, delta.shape[1]))
            row += classes[:, None] * delta[layer]
    return out


def generated_delta(steers: Sequence[Steer], layers: int, width: int) -> torch.Tensor:
    """(layers, d): what is added to every generated token, all vectors together."""
    return sum((steer.delta for steer in steers if steer.generated), torch.zeros(layers, width))


def applied(steer: Steer, norms: dict[int, torch.Tensor], generated: int) -> dict[str, Any]:
    """The report of what was done. norms: per steered layer (2, classes), how many prompt tokens each class has and their
    summed |h|. generated: how many generated tokens were fed.

    The dose is |added| / |h|, averaged over the touched prompt tokens and the layers; where only generated tokens are
    touched, the prompt's text tokens stand for them.
    """
    delta, doses, tokens = steer.delta, [], 0
    for layer in steer.touched_layers:
        count, total = norms[layer].cpu()
        classes = steer.classes(len(count))
        tokens = round(float(count @ classes))
        weighed = classes if bool(classes.any()) else torch.eye(len(count))[TEXT]
        if float(count @ weighed):
            doses.append(float(delta[layer].norm() * (count @ weighed) / (total @ weighed)))
    return {
        **steer.settings,
        "tokens": tokens + generated * steer.generated,
        "dose": sum(doses) / len(doses) if doses else None,
        "warning": steer.warning,
        **({} if steer.auto is None else {"auto": dict(steer.auto)}),
    }


def planned(steer: Steer) -> dict[str, Any]:
    """What would be done, as far as it can be said without a prompt.

    `added`, by layer: `norm` is |c w_l v_l|, `largest` its greatest element, `relative` its mean element in units of the
    vector's `mean_abs`, the mean difference that the probe measured; None where that is zero.
    """
    added, known, by_layer = [], steer.vector.calibrated_range, steer.delta
    for layer in steer.touched_layers:
        delta, unit = by_layer[layer], float(steer.vector.mean_abs[layer])
        added.append(
            {
                "layer": layer,
                "norm": float(delta.norm()),
                "largest": float(delta.abs().max()),
                "relative": float(delta.abs().mean()) / unit if unit > 0 else None,
            }
        )
    return {
        **steer.settings,
        "calibrated_range": None if known is None else list(known),
        "warning": steer.warning,
        "added": added,
    }
