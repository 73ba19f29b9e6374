"""Modality-preference steering: a scaled direction added to the residual stream (modality-preference paper, section 4).

h_l[t] <- h_l[t] + c * w_l * v_l at the chosen layers l for the chosen tokens t; c > 0 toward text, c < 0 toward vision; the
other way around for a vector that was negated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from steering.errors import RequestError
from steering.interventions.loop.until import Until
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.tokens import ALLOWED, TEXT, TokenChoice
from steering.protocol.intervention_spec import InterventionSpec, Part, check_choice
from steering.protocol.signals import Signal
from steering.protocol.wording import is_number, must, shown, whole_numbers
from steering.vectors.option import check_vector
from steering.vectors.vector import PREFERENCE, SteeringVector

NAME = "steering"
TOWARD = ("vision", "text")
"""The modalities that a request may name."""


@dataclass(frozen=True)
class Steer(Part):
    """A single vector in one request.

    `scale` is the signed coefficient c: c > 0 pushes in the direction in which the vector was measured, which for a modality
    preference is toward text. `layers` None means the vector's own; `tokens` is one of `prompt.tokens.TOKENS`, or "image:2"
    for the second image alone. Raises RequestError for any other value. `Steer.to` takes the modality instead.
    """

    vector: SteeringVector
    scale: float
    layers: tuple[int, ...] | None = None
    tokens: str = "all"
    toward: str | None = None
    auto: Mapping[str, Any] | None = None  # the measurement, where the modality was chosen automatically
    gate: Mapping[str, Any] | None = None  # the measurement, where a gate decided
    until: Until | None = None  # `scale` is the prompt's then, and that of the answer follows a number

    def __post_init__(self) -> None:
        _check_vector(self.vector)
        if not (is_number(self.scale) and math.isfinite(self.scale)):
            raise must("steering.scale", "be a finite number", self.scale)
        if self.layers is not None:
            object.__setattr__(self, "layers", whole_numbers("steering.layers", self.layers))
        try:
            _ = self.chosen
        except ValueError:
            raise must("steering.apply.tokens", f"be {ALLOWED}", self.tokens) from None
        count = len(self.vector.direction)
        if self.layers is not None and (not self.layers or any(not 0 <= layer < count for layer in self.layers)):
            raise RequestError(
                f"'steering.layers' must be layer numbers from 0 to {count - 1}; got {shown(list(self.layers))}.",
                param="steering.layers",
            )
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise RequestError(
                f"'steering.layers' must not name a layer twice; got {shown(list(self.layers))}.",
                param="steering.layers",
            )
        if self.until is not None:
            self._check_until()

    def _check_until(self) -> None:
        """Raise RequestError where the strength cannot follow a number."""
        if self.toward not in TOWARD:
            raise RequestError("'steering.until' goes with 'toward': vision or text.", param="steering.until")
        if not self.chosen.generated:
            raise RequestError(
                f"'steering.until' moves the strength at generated tokens, which 'apply.tokens' {self.tokens!r} leaves out.",
                param="steering.apply.tokens",
            )
        low, high = self.span
        if not low <= abs(self.scale) <= high:
            raise RequestError(
                f"'steering.strength', where 'until' begins, must be from {low:g} to {high:g}; got {abs(self.scale):g}.",
                param="steering.strength",
            )

    @classmethod
    def to(cls, vector: SteeringVector, toward: str, strength: float = 1.0, **options: Any) -> Steer:
        """Push toward "vision" or "text" with a strength >= 0.

        Strength 0 is exactly off. 1.0 is the vector's own weight, that is the calibrated one, or the published weight of a
        vector that was not calibrated (see `published`). The vector must be a modality preference; the sign of one that was
        negated is corrected (see `SteeringVector.positive`).
        """
        if toward not in TOWARD:
            raise RequestError(
                f"'steering.toward' must be one of {', '.join(TOWARD)}; got {shown(toward)}.", param="steering.toward"
            )
        if not (is_number(strength) and math.isfinite(strength) and strength >= 0):
            raise must("steering.strength", "be a finite number of at least 0", strength)
        _check_vector(vector)
        if vector.positive is None:
            raise RequestError(
                f"'steering.toward' needs a vector of kind {PREFERENCE!r}, but {vector.name!r} is of kind "
                f"{vector.kind[:64]!r}. Give it a signed 'scale' in 'steering.vectors' instead.",
                param="steering.vector",
                code="not_a_preference",
            )
        scale = strength if toward == vector.positive else 0.0 - strength  # -strength would be -0.0 where it is off
        return cls(vector, scale, toward=toward, **options)

    @classmethod
    def together(cls, parts: Sequence[Steer]) -> Steering:
        return Steering(tuple(parts))

    @cached_property
    def delta(self) -> torch.Tensor:
        """The tensor added to a chosen token, (layers, d) float32."""
        return self.vector.delta(self.scale, self.layers)

    @property
    def span(self) -> tuple[float, float]:
        """The least and the greatest strength, which differ where it follows a number."""
        size = abs(self.scale)
        return (size, size) if self.until is None else self.until.span(self.vector.calibrated_range)

    @property
    def unit_scale(self) -> float:
        """The signed coefficient of strength 1 toward its modality."""
        return 1.0 if self.toward in (None, self.vector.positive) else -1.0

    @cached_property
    def unit(self) -> torch.Tensor:
        """The tensor added at strength 1 toward its modality, (layers, d) float32."""
        return self.vector.delta(self.unit_scale, self.layers)

    @property
    def way(self) -> str | None:
        """The modality that it actually pushes toward, however it was requested.

        None where it does nothing, or the vector is no modality preference.
        """
        if self.until is not None:
            return self.toward
        if self.scale == 0 or self.vector.positive is None:
            return None
        return next(way for way in TOWARD if (way == self.vector.positive) == (self.scale > 0))

    @property
    def touched_layers(self) -> tuple[int, ...]:
        """The layers where the vector is added, numbered from 0."""
        return self.layers or self.vector.layers

    @property
    def published(self) -> float | None:
        """The strength in published units; None where the vector's published weight is not known."""
        unit = self.vector.published
        return None if unit is None else abs(self.scale) * unit

    @property
    def settings(self) -> dict[str, Any]:
        """The keys with which every report on it begins."""
        return {
            "name": self.vector.name,
            "digest": self.vector.identity,
            "toward": self.toward,
            "strength": abs(self.scale),
            "published": self.published,
            "scale": self.scale,
            "layers": list(self.touched_layers),
            "apply": {"tokens": self.tokens},
        }

    @cached_property
    def chosen(self) -> TokenChoice:
        """The tokens that the vector is added to."""
        return TokenChoice(self.tokens)

    def warning(self, pictured: bool | None = None) -> str | None:
        """Return a warning about a strength that calibration did not measure, or about a vision that is not there.

        pictured: whether the prompt has an image, None where it is not known.
        """
        warnings, calibrated = [], self.vector.calibrated_range
        if calibrated is not None and abs(self.scale) > calibrated[1]:
            warnings.append(
                f"strength {abs(self.scale):g} is beyond the calibrated range {calibrated[0]:g} to {calibrated[1]:g}"
            )
        if pictured is False and self.way == "vision":
            warnings.append("it prefers vision, but the request holds no image")
        return "; ".join(warnings) or None


def _check_vector(vector: Any) -> None:
    if not isinstance(vector, SteeringVector):
        raise must("steering.vector", "be a SteeringVector, as VectorStore.get and SteeringVector.load return", vector)


def applied(
    steer: Steer, norms: dict[int, torch.Tensor], generated: int, course: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the report of one vector that was added.

    norms: per steered layer (2, classes), how many prompt tokens each class has and the sum over them of 1 / |h|. generated:
    how many generated tokens were fed. course: (1 + generated, 2), as `Until.report` takes it, where its strength moved.

    The dose is |added| / |h|, averaged over the prompt's touched tokens and the layers, and None where it has none: the
    states of generated tokens are not measured, which would cost time at every step of every answer.
    """
    layers = list(steer.touched_layers)
    counts, inverses = torch.stack([norms[layer] for layer in layers]).cpu().unbind(1)  # (touched layers, classes)
    classes = steer.chosen.classes(counts.shape[1])
    tokens = round(float(counts[0] @ classes))
    pictured = bool(counts[0, TEXT + 1 :].any())
    doses = steer.delta[layers].norm(dim=-1) * (inverses @ classes) / max(tokens, 1)
    return {
        **steer.settings,
        "tokens": tokens + generated * steer.chosen.generated,
        "dose": float(doses.mean()) if tokens else None,
        "warning": steer.warning(pictured),
        **({} if steer.auto is None else {"auto": dict(steer.auto)}),
        **({} if steer.gate is None else {"gate": dict(steer.gate)}),
        **(
            {}
            if steer.until is None or course is None
            else {"until": steer.until.report(course, steer.toward or "", steer.span)}
        ),
    }


def planned(steer: Steer, pictured: bool | None = None) -> dict[str, Any]:
    """Report a vector's planned effect, as far as it is known without a prompt.

    pictured: whether the prompt has an image, None where it is not known.

    `added`, by layer: `norm` is |c w_l v_l|, `largest` its greatest element, `relative` its mean element in units of the
    vector's `mean_abs`, the mean difference that the probe measured; None where that is zero.
    """
    added, calibrated, by_layer = [], steer.vector.calibrated_range, steer.delta
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
        "calibrated_range": None if calibrated is None else list(calibrated),
        "warning": steer.warning(pictured),
        "added": added,
    }


def check_steer(mllm: MLLM, steer: Steer, images: int | None = None) -> None:
    """Raise VectorError or RequestError unless a vector can be added to the states of a model.

    images: the number of images in the prompt; None where the prompt is not known.
    """
    check_vector(mllm, steer.vector, "steering.vector")
    if images is not None:
        check_choice(steer.chosen, images, "steering.apply.tokens")


@dataclass(frozen=True)
class Steering(InterventionSpec):
    """The vectors that are added together in one request, made from its `Steer`s."""

    steers: tuple[Steer, ...]

    path = (NAME,)
    data = (Until,)

    @property
    def loop(self) -> Steer | None:
        """The vector whose strength follows a number; None where none does."""
        return next((steer for steer in self.steers if steer.until is not None), None)

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset(steer.until.gauge.signal for steer in self.steers if steer.until is not None)

    @property
    def refuses_twin(self) -> str | None:
        return None if self.loop is None else "steering.until"

    @property
    def toward(self) -> Iterable[str]:
        """The modality that each vector actually pushes toward.

        "other" stands for a vector that is no modality preference, "off" for a preference that does nothing.
        """
        return [
            steer.way or ("other" if steer.scale or steer.vector.positive is None else "off") for steer in self.steers
        ]

    @property
    def vectors(self) -> Sequence[str]:
        return [steer.vector.name for steer in self.steers]

    @property
    def digests(self) -> Mapping[str, str]:
        return {steer.vector.name: steer.vector.identity for steer in self.steers}

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        for steer in self.steers:
            check_steer(mllm, steer, len(prompt.layout.images))
            if steer.until is not None:
                steer.until.check(prompt.layout)
        if self.loop is not None and len(self.steers) > 1:
            raise RequestError("'steering.until' goes with a single vector.", param="steering.until")

    def report(self, measured: Any) -> list[dict[str, Any]]:
        """Report the effect of each vector.

        measured: per steered layer the norms (see `applied`), how many generated tokens were fed, and the course of a
        strength that moved.
        """
        norms, fed, course = measured
        return [applied(steer, norms, fed, course) for steer in self.steers]

    def brief(self, report: Any) -> Any:
        return [
            {**entry, "until": {key: value for key, value in entry["until"].items() if key != "course"}}
            if "until" in entry
            else entry
            for entry in report
        ]
