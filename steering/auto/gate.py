"""Conditional steering: vectors act where the prompt's state at a layer lies along a condition vector.

The condition is that of CAST (Lee et al. 2024, Programming Refusal with Conditional Activation Steering, section 3): the
similarity of the prompt's state with a direction, against a threshold. The state is that of the prompt's last token, without
any intervention; it is measured by a request of its own, so that steering acts on the whole prompt or on nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from steering.vectors.sparse import SparseDictionary
from steering.vectors.vector import SteeringVector

MEASURES = ("cosine", "projection", "probe", "feature")
"""The measures of a state along a direction.

They are its cosine, its length along it (the direction's activation) in units of the residual stream, the probability of a
logistic probe, whose weights the direction is, and the activation of a sparse dictionary's feature, whose row it is.
"""


@dataclass(frozen=True)
class GateTerm:
    """A condition on the prompt's state at one layer: its measure along a vector is above a threshold, or `below` it.

    `dictionary` is that of a feature. Raises RequestError for a layer that the vector does not have, and for other values
    that are not allowed.
    """

    vector: SteeringVector
    layer: int
    threshold: float
    measure: str = "cosine"
    below: bool = False
    dictionary: SparseDictionary | None = None

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
        if self.measure == "probe" and self._bias is None:
            raise RequestError(
                f"'steering.when.measure': {self.vector.name!r} is no probe; `helmsight vectors build --gate --learner "
                "probe` builds one.",
                param="steering.when.measure",
            )
        if self.measure == "feature" and (self.dictionary is None or self.layer != self.dictionary.layer):
            raise RequestError(
                f"'steering.when.measure': {self.vector.name!r} is no feature of a sparse dictionary at layer {self.layer}.",
                param="steering.when.measure",
            )
        if not math.isfinite(self.threshold):
            raise RequestError("'steering.when.above' must be a finite number.", param="steering.when.above")

    def value(self, states: torch.Tensor) -> float:
        """Return the measure of a prompt's states, (layers, d)."""
        state, direction = states[self.layer].double(), self.vector.direction[self.layer].double()
        if self._bias is not None and self.measure == "probe":
            return float(torch.sigmoid(state @ direction + self._bias))
        if self.dictionary is not None and self.measure == "feature":
            return float(self.dictionary.encode(states[self.layer])[self.vector.info["dictionary"]["feature"]])
        along = float(state @ direction) / float(direction.norm())
        return along if self.measure == "projection" else along / float(state.norm())

    @property
    def _bias(self) -> float | None:
        """The probe's bias at the layer; None for a vector that is no probe."""
        bias = self.vector.info.get("gate", {}).get("bias")
        return None if bias is None else float(bias[self.layer])

    def holds(self, value: float) -> bool:
        """Return True where a measure meets the condition."""
        return value < self.threshold if self.below else value > self.threshold

    def report(self, states: torch.Tensor) -> dict[str, Any]:
        """Return the measure of a prompt's states (layers, d), and whether it meets the condition, as JSON."""
        value = self.value(states)
        return {
            "vector": self.vector.name,
            "layer": self.layer,
            "measure": self.measure,
            "value": value,
            "below" if self.below else "above": self.threshold,
            "holds": self.holds(value),
        }


@dataclass(frozen=True)
class Gate:
    """Several conditions, of which `every` one must hold, or any; a condition may be such a group itself."""

    terms: tuple[GateTerm | Gate, ...]
    every: bool = True

    @property
    def conditions(self) -> Iterator[GateTerm]:
        """All conditions, those of inner groups too."""
        for term in self.terms:
            yield from term.conditions if isinstance(term, Gate) else (term,)

    def report(self, states: torch.Tensor) -> dict[str, Any]:
        """Return whether the gate is open for a prompt's states (layers, d), and every measure, as JSON."""
        is_open, terms = self._evaluate(states)
        return {"open": is_open, "match": "all" if self.every else "any", "terms": terms}

    def _evaluate(self, states: torch.Tensor) -> tuple[bool, list[dict[str, Any]]]:
        terms = []
        for term in self.terms:
            if isinstance(term, Gate):
                inner = term.report(states)
                terms.append({"match": inner["match"], "terms": inner["terms"], "holds": inner["open"]})
            else:
                terms.append(term.report(states))
        holds = [term["holds"] for term in terms]
        return all(holds) if self.every else any(holds), terms


@dataclass(frozen=True)
class Gated(Prelude):
    """Steering that acts where its gate is open."""

    path: ClassVar[tuple[str, ...]] = Steering.path

    steering: Steering | Auto
    gate: Gate

    @property
    def vectors(self) -> Sequence[str]:
        names = [*self.steering.vectors, *(term.vector.name for term in self.gate.conditions)]
        return list(dict.fromkeys(names))

    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        for term in self.gate.conditions:
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
        followed = [steer.until if report["open"] else None for steer in self.steering.steers]
        return Steering(
            tuple(
                replace(steer, scale=scale, gate=report, until=until)
                for (steer, scale), until in zip(steers, followed, strict=True)
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
