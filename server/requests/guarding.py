"""The plan of a guard: its conditions as functions of an answer's numbers, and the request that it gives again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import ApiError, BadRequest
from server.wire.chat import ChatRequest
from server.wire.guard import Comparison, Guard
from steering import RequestError
from steering.protocol.readout import REGISTRY, Scalar
from steering.protocol.request import RANGES

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
PLACE = "guard.then"


def judged() -> dict[str, tuple[str, type]]:
    """Return the numbers that conditions can be about: for each name its readout and its type."""
    return {name: (readout.name, kind) for readout in REGISTRY.values() for name, kind in readout.scalars.items()}


@dataclass(frozen=True)
class GuardPlan:
    """The conditions of a guard.

    `readouts` are those that the conditions need. With `every`, all conditions must hold for an answer to be given again.
    """

    conditions: Mapping[str, bool | Comparison]
    readouts: frozenset[str]
    every: bool
    retries: int

    @classmethod
    def of(cls, guard: Guard, supported: frozenset[str]) -> GuardPlan:
        """Return the plan of a guard; raises BadRequest for a number that no readout has, or that the engine lacks."""
        known, readouts = judged(), set()
        for name, condition in guard.when.items():
            place = f"guard.when.{name[:64]}"
            if name not in known:
                raise BadRequest(
                    f"'{place}' is no number of a readout; allowed: {', '.join(known)}.", place, "unknown_parameter"
                )
            readout, kind = known[name]
            if readout not in supported:
                raise BadRequest(
                    f"'{place}' needs the readout {readout!r}, which this server's engine does not support.", place,
                    "unsupported_value",
                )  # fmt: skip
            if isinstance(condition, bool) != (kind is bool):
                form = "true or false" if kind is bool else "a sign and a number, such as '< .5'"
                raise BadRequest(f"'{place}' must be {form}.", place)
            readouts.add(readout)
        return cls(guard.when, frozenset(readouts), guard.match == "all", guard.retries)

    def raised(self, numbers: Mapping[str, Scalar]) -> list[str]:
        """Return the conditions that hold for an answer with these numbers; none if not enough of them do."""
        held = [name for name, condition in self.conditions.items() if _holds(condition, numbers.get(name))]
        return [] if self.every and len(held) < len(self.conditions) else held

    def numbers(self, numbers: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the numbers that the conditions are about."""
        return {name: numbers.get(name) for name in self.conditions}


def _holds(condition: bool | Comparison, value: Scalar) -> bool:
    if value is None:
        return False
    if isinstance(condition, Comparison):
        return SIGNS[condition.sign](float(value), condition.bound)
    return value is condition


def given_again(body: Mapping[str, Any], guard: Guard, chats: type[ChatRequest]) -> dict[str, Any]:
    """Return the body of the request that a guard gives again; raises BadRequest for a field that `then` cannot have."""
    for name in guard.then:
        if name not in chats.asking and name not in RANGES:
            allowed = ", ".join((*chats.asking, *RANGES))
            place = f"{PLACE}.{name[:64]}"
            raise BadRequest(f"'{place}' cannot be given again; allowed: {allowed}.", place, "unknown_parameter")
    others = {name: value for name, value in body.items() if name not in ("guard", "guard_stream", "baseline")}
    return {**others, **guard.then}


def within_then(error: ApiError | RequestError, guard: Guard) -> ApiError | RequestError:
    """Return an error about a field of `then` under its place."""
    head = (error.param or "").partition(".")[0].partition("[")[0]
    if head not in guard.then or error.param is None:
        return error
    message = str(error).replace(f"'{error.param}", f"'{PLACE}.{error.param}")
    return BadRequest(message, f"{PLACE}.{error.param}", error.code or "invalid_value")
