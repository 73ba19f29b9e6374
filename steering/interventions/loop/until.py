"""Closed-loop strength: the strength of steering follows a number that every step measures, until that reaches a target.

The controller is an integral one with a bounded state, on a smoothed measurement with a dead band. At each token, the
prompt's last one first, with r the number measured at it:

    y <- r at first, then y + smoothing * (r - y)
    e  = target - y, turned around where steering lowers the number; 0 where |e| <= band
    s <- s + gain * (high - low) * e, held within [low, high]

and the next token is steered with strength s. Attention varies from token to token with the kind of word: the smoothing
averages over about 1 / smoothing tokens, and within the band nothing moves, so that the strength follows the level and not
the words. Since the state is the bounded strength itself, nothing winds up at a bound. A token without a measurement
changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from steering.errors import Inapplicable, RequestError
from steering.prompt.layout import Layout
from steering.prompt.spans import CONTEXT
from steering.protocol.recorder import gauges
from steering.protocol.signals import StepGauge
from steering.protocol.wording import is_number, shown

NUMBER, TARGET, STEP, SMOOTHING, BAND, LOW, HIGH, STRENGTH, ESTIMATE = range(9)
"""Columns of a slot's loop; ESTIMATE is y, NaN before the first measurement, and STRENGTH is s."""
COLUMNS = 9
POINTS = 128
"""The most points of a course in a report."""


@dataclass(frozen=True)
class Until:
    """A target for a number of `gauges`, and the controller that moves a strength toward it.

    range: the least and the greatest strength; None for 0 and the greatest calibrated one of the vector. Raises RequestError
    for values that are not allowed.
    """

    number: str
    target: float
    gain: float = 1.0
    smoothing: float = 0.25
    band: float = 0.02
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        registered = gauges()
        if self.number not in registered:
            raise RequestError(
                f"'steering.until' must name one of {', '.join(registered)}; got {shown(self.number)}.",
                param="steering.until",
            )
        gauge = registered[self.number]
        _check(f"until.{self.number}", self.target, gauge.low, gauge.high)
        _check("control.gain", self.gain, 0.0, 100.0)
        _check("control.smoothing", self.smoothing, 0.01, 1.0)
        _check("control.band", self.band, 0.0, gauge.high - gauge.low)
        if self.range is None:
            return
        if len(self.range) != 2 or not all(is_number(value) and math.isfinite(value) for value in self.range):
            raise RequestError("'steering.control.range' must be two strengths.", param="steering.control.range")
        if not 0 <= self.range[0] < self.range[1]:
            raise RequestError(
                "'steering.control.range' must be the least and the greatest strength, of at least 0; got "
                f"{shown(list(self.range))}.",
                param="steering.control.range",
            )

    @property
    def gauge(self) -> StepGauge:
        """The number that is followed."""
        return gauges()[self.number]

    def span(self, calibrated: tuple[float, float] | None) -> tuple[float, float]:
        """Return the least and the greatest strength; raises RequestError where nothing says how far it may go."""
        if self.range is None and calibrated is None:
            raise RequestError(
                "'steering.control.range' is required: the vector was not calibrated.", param="steering.control.range"
            )
        low, high = self.range or (0.0, calibrated[1] if calibrated is not None else 0.0)
        if calibrated is not None and high > calibrated[1]:
            raise RequestError(
                f"'steering.control.range' must end within the calibrated range, at most {calibrated[1]:g}; got {high:g}.",
                param="steering.control.range",
            )
        return low, high

    def check(self, layout: Layout) -> None:
        """Raise Inapplicable where a prompt lacks what the number needs."""
        there = {"image": bool(layout.images), "context": layout.count(CONTEXT) > 0}
        missing = [need for need in self.gauge.needs if not there[need]]
        if missing:
            named = " and ".join({"image": "an image", "context": "a text context"}[need] for need in missing)
            raise Inapplicable(
                f"'steering.until.{self.number}' needs {named}, which the request lacks.",
                param=f"steering.until.{self.number}",
            )

    def loop(self, start: float, toward: str, span: tuple[float, float]) -> torch.Tensor:
        """Return a slot's loop, (COLUMNS,), at its start."""
        low, high = span
        step = self.gain * (high - low) * (1 if toward == self.gauge.rises else -1)
        number = [*gauges()].index(self.number)
        return torch.tensor(
            [number, self.target, step, self.smoothing, self.band, low, high, start, math.nan], dtype=torch.float32
        )

    def report(self, course: torch.Tensor, toward: str, span: tuple[float, float]) -> dict[str, Any]:
        """Report a course, (tokens, 2): at each token, the prompt's last one first, the strength and the number measured.

        At most `POINTS` tokens are listed, every k-th one.
        """
        strengths, measured = course.double().unbind(1)
        finite = measured[~measured.isnan()]
        met = finite >= self.target if toward == self.gauge.rises else finite <= self.target
        every = -(-len(course) // POINTS)
        return {
            self.number: self.target,
            "control": {"gain": self.gain, "smoothing": self.smoothing, "band": self.band, "range": list(span)},
            "strength": {
                "first": float(strengths[0]), "last": float(strengths[-1]), "mean": float(strengths.mean()),
                "least": float(strengths.min()), "most": float(strengths.max()),
            },
            "mean": float(finite.mean()) if len(finite) else None,
            "met": float(met.double().mean()) if len(finite) else None,
            "course": {
                "every": every,
                "strength": strengths[::every].tolist(),
                self.number: [None if math.isnan(value) else value for value in measured[::every].tolist()],
            },
        }  # fmt: skip


def followed(loop: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Return loops (rows, COLUMNS) after a measurement of each, (rows,), by the rule of this module."""
    target, step, smoothing, band, low, high, strength, estimate = loop[:, TARGET:].unbind(1)
    level = torch.where(estimate.isnan(), measured, estimate + smoothing * (measured - estimate))
    error = target - level
    error = torch.where(error.abs() <= band, 0.0, error)
    moved = (strength + step * error).clamp(low, high)
    is_measured = ~measured.isnan()
    state = torch.stack([torch.where(is_measured, moved, strength), torch.where(is_measured, level, estimate)], 1)
    return torch.cat([loop[:, :STRENGTH], state], 1)


def selected(numbers: dict[str, torch.Tensor], rows: torch.Tensor, loop: torch.Tensor) -> torch.Tensor:
    """Return the number that each loop follows, (loops,), of rows (loops,) of a pass."""
    none = loop.new_full((len(loop),), torch.nan)
    table = torch.stack([numbers[name][rows] if name in numbers else none for name in gauges()])  # (gauges, loops)
    return table.gather(0, loop[:, NUMBER].long()[None])[0]


def _check(name: str, value: Any, low: float, high: float) -> None:
    if not (is_number(value) and low <= value <= high):
        param = f"steering.{name}"
        raise RequestError(f"'{param}' must be a number from {low:g} to {high:g}; got {shown(value)}.", param=param)
