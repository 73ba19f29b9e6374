"""Conditional steering: vectors act where the prompt's state at a layer lies along a condition vector.

The condition is that of CAST (Lee et al. 2024, Programming Refusal with Conditional Activation Steering, section 3): the
similarity of the prompt's state with a direction, against a threshold. The state is that of the prompt's last token, without
any intervention; it is measured by a request of its own, so that steering acts on the whole prompt or on nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from steering.auto.reliability import Auto
from steering.errors import RequestError
from steering.interventions.steer import Steer, Steering
from steering.model.mllm import MLLM
from steering.protocol.intervention import Prelude, Rounds
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.request import Request, Sampling
from steering.vectors.option import check_vector
from steering.vectors.vector import SteeringVector

MEASURES = ("cosine", "projection")
"""The measures of a state along a direction: its cosine, and its length along it in units of the residual stream."""


@dataclass(frozen=True)
class GateTerm:
    """A condition on the prompt's state at one layer: its measure along a vector is above a threshold, or `below` it.

    Raises RequestError for a layer that the vector does not have, and for other values that are not allowed.
    """

    vector: SteeringVector
    layer: int
    threshold: float
    measure: str = "cosine"
    below: bool = False

    def __post_init__(self) -> None:
        count = len(self.vector.direction)
        if not 0 <= self.layer < count:
            raise RequestError(
                f"'steering.when.layer' must be from 0 to {count - 1}; got {self.layer}.", param="steering.when.layer"
            )
        if self.measure not in MEASURES:
            raise RequestError(
                f"'steering.when.measure' must be one of {', '.join(MEASURES)}; got {self.measure[:64]!r}.",
                param="steering.when.measure",
            )
        if not math.isfinite(self.threshold):
            raise RequestError("'steering.when.above' must be a finite number.", param="steering.when.above")

    def value(self, states: torch.Tensor) -> float:
        """Return the measure of a prompt's states, (layers, d)."""
        state, direction = states[self.layer].double(), self.vector.direction[self.layer].double()
        along = float(state @ direction) / float(direction.norm())
        return along if self.measure == "projection" else along / float(state.norm())

    def holds(self, value: float) -> bool:
        """Return True where a measure meets the condition."""
        return value < self.threshold if self.below else value > self.threshold


@dataclass(frozen=True)
class Gate:
    """Several conditions, of which `every` one must hold, or any."""

    terms: tuple[GateTerm, ...]
    every: bool = True

    def report(self, states: torch.Tensor) -> dict[str, Any]:
        """Return whether the gate is open for a prompt's states (layers, d), and every measure, as JSON."""
        values = [term.value(states) for term in self.terms]
        held = [term.holds(value) for term, value in zip(self.terms, values, strict=True)]
        terms = [
            {
                "vector": term.vector.name,
                "layer": term.layer,
                "measure": term.measure,
                "value": value,
                "below" if term.below else "above": term.threshold,
                "holds": holds,
            }
            for term, value, holds in zip(self.terms, values, held, strict=True)
        ]
        return {"open": all(held) if self.every else any(held), "match": "all" if self.every else "any", "terms": terms}


@dataclass(frozen=True)
class Gated(Prelude):
    """Steering that acts where its gate is open."""

    path: ClassVar[tuple[str, ...]] = Steering.path

    steering: Steering | Auto
    gate: Gate

    @property
    def vectors(self) -> Sequence[str]:
        names = [*self.steering.vectors, *(term.vector.name for term in self.gate.terms)]
        return list(dict.fromkeys(names))

    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        for term in self.gate.terms:
            check_vector(mllm, term.vector, "steering.when.vector")
        (result,) = yield [measured(request)]
        states = result.choices[0].states
        assert states is not None
        return self.decided(self.gate.report(states))

    def decided(self, report: dict[str, Any]) -> InterventionSpec:
        """Return the steering, with strength 0 where the gate is closed; the report goes with it."""
        if isinstance(self.steering, Auto):
            if report["open"]:
                return replace(self.steering, gate=report)
            off = Steer(self.steering.vector, 0.0, self.steering.layers, self.steering.tokens, gate=report)
            return Steering((off,))
        scales = [steer.scale if report["open"] else 0.0 for steer in self.steering.steers]
        steers = zip(self.steering.steers, scales, strict=True)
        untils = [steer.until if report["open"] else None for steer in self.steering.steers]
        return Steering(
            tuple(
                replace(steer, scale=scale, gate=report, until=until)
                for (steer, scale), until in zip(steers, untils, strict=True)
            )
        )


def measured(request: Request) -> Request:
    """Return the request that measures the states of another one's prompt."""
    tools = None if request.tools is None else replace(request.tools, required=False)
    return Request(
        request.messages,
        Sampling(max_tokens=1),
        states=True,
        tools=tools,
        cache_salt=request.cache_salt,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=request.continue_final_message,
    )
