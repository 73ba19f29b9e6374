"""The parts that a model is prepared by: a steering vector, and the calibrations without which some features lack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

VECTOR = "vector"
"""The name of the part that is a vector and no calibration."""


@dataclass(frozen=True)
class PreparedPart:
    """Something that is measured on a model once.

    measured: its name in a `Calibration`, or `VECTOR`. serves: the features that use it. without: what they do while it is
    missing. command: what measures it. readouts, interventions: the names of those that use it.
    degrades: they work without it, but less well.
    """

    name: str
    measured: str
    serves: str
    without: str
    command: str
    readouts: frozenset[str] = frozenset()
    interventions: frozenset[str] = frozenset()
    degrades: bool = False


PARTS = (
    PreparedPart(
        "vector", VECTOR, "steering toward vision, text or auto", "these presets do not exist",
        "helmsight probe --use", interventions=frozenset({"steering"}),
    ),
    PreparedPart(
        "sage", "divergence", "sage.think", "it uses rough thresholds of two prompts",
        "helmsight probe --calibrate-sage", interventions=frozenset({"sage.think"}), degrades=True,
    ),
    PreparedPart(
        "sinks", "sinks", "discount_sinks of the readouts", "requests with it are refused",
        "helmsight probe --calibrate-sinks", readouts=frozenset({"patches"}),
    ),
    PreparedPart(
        "flags", "flags", "readout flags", "both flags are null, so that no alert on them fires",
        "helmsight probe --calibrate-flags", readouts=frozenset({"flags"}),
    ),
    PreparedPart(
        "alarm", "alarm", "readout alarm", "it is null, so that no alert on it fires",
        "helmsight eval alarm --keep", readouts=frozenset({"alarm"}),
    ),
    PreparedPart(
        "surprise", "surprise", "steering auto by surprise", "requests without a bound of their own are refused",
        "helmsight probe --calibrate-surprise", interventions=frozenset({"steering"}),
    ),
)  # fmt: skip
"""Every part, in the order in which `helmsight prepare` measures them."""


@dataclass(frozen=True)
class PartState:
    """A part of a model and whether it is there."""

    part: PreparedPart
    there: bool

    @property
    def said(self) -> str:
        """The state in words."""
        part = self.part
        return (
            f"{part.name}: there, for {part.serves}"
            if self.there
            else f"{part.name}: missing; {part.serves}: {part.without}"
        )


def lacking(interventions: Collection[str], states: Collection[PartState]) -> list[str]:
    """Return in words what interventions do without and still work, of the parts in `states`."""
    return [
        f"{state.part.serves}: {state.part.without}, since this model has no calibration for it ({state.part.command})"
        for state in states
        if state.part.degrades and not state.there and not state.part.interventions.isdisjoint(interventions)
    ]


def states(measured: Collection[str]) -> list[PartState]:
    """Return the state of every part; `measured` are the names of those that are there, as `PreparedPart.measured`."""
    return [PartState(part, part.measured in measured) for part in PARTS]


def table(states: Collection[PartState], model: str) -> list[str]:
    """Return the lines that `doctor` and `prepare` show, with advice on missing parts."""
    lines = []
    for state in states:
        lines.append(f"{'ok' if state.there else 'warning':8} {'prepared':9} {state.said}")
        if not state.there:
            lines.append(f"{'':18} -> {advice(state.part, model)}")
    return lines


def advice(part: PreparedPart, model: str) -> str:
    """Return the commands that measure a part."""
    return f"'helmsight prepare {model}' measures all that is missing, '{part.command} --model {model}' this alone"
