"""The plan of a guard: its conditions as functions of an answer's numbers, and the request that it gives again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import ApiError, BadRequest
from server.wire.chat import ChatRequest
from server.wire.guard import MAX_CONDITIONS, MAX_RETRIES, Guard
from steering import NumberCondition, RequestError, conditioned
from steering.protocol.readout import Scalar
from steering.protocol.request import RANGES

PLACE = "guard.then"


@dataclass(frozen=True)
class GuardPlan:
    """The conditions of a guard; with `every`, all must hold for an answer to be given again."""

    conditions: Sequence[NumberCondition]
    every: bool
    retries: int

    @classmethod
    def of(cls, guard: Guard, available: Mapping[str, bool]) -> GuardPlan:
        """Return the plan of a guard.

        available: by readout of the engine whether it has numbers. Raises BadRequest for a number that no readout has, that
        the engine lacks, or that is null because the model was not calibrated for it.
        """
        conditions = []
        for name, value in guard.when.items():
            place = f"guard.when.{name[:64]}"
            try:
                condition = NumberCondition.of(name, value)
            except KeyError:
                raise BadRequest(
                    f"'{place}' is no number of a readout; allowed: {', '.join(conditioned())}.", place,
                    "unknown_parameter",
                ) from None  # fmt: skip
            except ValueError as error:
                raise BadRequest(f"'{place}' {error}.", place) from None
            if condition.readout not in available:
                raise BadRequest(
                    f"'{place}' needs the readout {condition.readout!r}, which this server's engine does not support.",
                    place,
                    "unsupported_value",
                )
            if not available[condition.readout]:
                raise BadRequest(
                    f"'{place}' would never hold: this model was not calibrated for the readout {condition.readout!r} "
                    "(helmsight prepare measures it).",
                    place,
                    "unsupported_value",
                )
            conditions.append(condition)
        return cls(conditions, guard.match == "all", guard.retries)

    @property
    def readouts(self) -> frozenset[str]:
        """The readouts that the conditions need."""
        return frozenset(condition.readout for condition in self.conditions)

    def raised(self, numbers: Mapping[str, Scalar]) -> list[str]:
        """Return the conditions that hold for an answer with these numbers; none if not enough of them do."""
        met = [condition.name for condition in self.conditions if condition.holds(numbers.get(condition.name))]
        return [] if self.every and len(met) < len(self.conditions) else met

    def numbers(self, numbers: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the numbers that the conditions are about."""
        return {condition.name: numbers.get(condition.name) for condition in self.conditions}


def guard_card(readouts: frozenset[str], available: Mapping[str, bool], chats: type[ChatRequest]) -> dict[str, Any]:
    """Return what a guard can be: the numbers of `readouts` that its conditions may be about, and the fields of `then`.

    available: the readouts that have numbers; those of others are null, so that conditions on them are refused.
    """
    return {
        "conditions": [
            {
                "name": name,
                "readout": readout,
                "type": "boolean" if kind is bool else "number",
                "available": available[readout],
            }
            for name, (readout, kind) in conditioned().items()
            if readout in readouts
        ],
        "signs": [*NumberCondition.signs],
        "then": givable(chats),
        "max_conditions": MAX_CONDITIONS,
        "max_retries": MAX_RETRIES,
    }


def givable(chats: type[ChatRequest]) -> list[str]:
    """Return the fields that `then` may have."""
    return [*chats.asking, *RANGES]


def given_again(body: Mapping[str, Any], guard: Guard, chats: type[ChatRequest]) -> dict[str, Any]:
    """Return the body of the request that a guard gives again; raises BadRequest for a field that `then` cannot have."""
    for name in guard.then:
        if name not in (fields := givable(chats)):
            allowed = ", ".join(fields)
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
