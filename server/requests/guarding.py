"""The plan of a guard: its conditions as functions of an answer's numbers, and the request that it gives again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.errors import ApiError, BadRequest
from server.requests.skipping import Skipping
from server.wire.chat import ChatRequest
from server.wire.guard import MAX_CONDITIONS, MAX_RETRIES, Guard
from steering import NumberCondition, Request, RequestError, Sampling, conditioned
from steering.protocol.readout import Scalar
from steering.protocol.request import RANGES

PLACE = "guard.then"
_QUOTED = re.compile(r"'([a-z_]+)((?:[.\[][^']*)?)'")
"""A place in a request, as messages quote it: a field, and what is within it."""


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
    """Return the body of the request that a guard gives again; raises BadRequest for a field that `then` cannot have.

    `max_tokens` of `then` replaces the limit of the answer under either of its names.
    """
    for name in guard.then:
        if name not in (fields := givable(chats)):
            allowed = ", ".join(fields)
            place = f"{PLACE}.{name[:64]}"
            raise BadRequest(f"'{place}' cannot be given again; allowed: {allowed}.", place, "unknown_parameter")
    left_out = ["guard", "guard_stream", "baseline", *(["max_completion_tokens"] if "max_tokens" in guard.then else [])]
    others = {name: value for name, value in body.items() if name not in left_out}
    return {**others, **guard.then}


def within_then(error: ApiError | RequestError, guard: Guard) -> ApiError | RequestError:
    """Return an error that names a field of `then` under its place; others are returned as they are.

    Of an error about several fields, those of `then` are meant, since the request alone does not have it.
    """
    param = error.param or ""
    if param.startswith(PLACE):
        return error
    own, message = _head(param) in guard.then, _placed(str(error), guard)
    if own:
        return BadRequest(message, f"{PLACE}.{param}", error.code or "invalid_value")
    named = [quoted for quoted in _QUOTED.finditer(str(error)) if quoted[1] in guard.then]
    if not named or not param:
        return error
    return BadRequest(message, f"{PLACE}.{named[0][1]}{named[0][2]}", error.code or "invalid_value")


def skipped_of_then(skipping: Skipping, guard: Guard) -> dict[str, str]:
    """Return the skipped parts of the request that is given again which are due to `then`, under their places there."""
    whys = {place: _placed(why, guard) for place, why in skipping.skipped.items()}
    return {f"{PLACE}.{place}": why for place, why in whys.items() if _head(place) in guard.then or f"'{PLACE}" in why}


def alike(chat: ChatRequest, first: Request, other: ChatRequest, again: Request) -> bool:
    """Return whether a request can only be answered as the first one was: greedily, and with nothing changed."""
    if not (first.sampling.greedy and again.sampling.greedy) or {*first.asked} != {*again.asked}:
        return False
    heads = {spec.path[0] for spec in again.asked.values()}
    if any(chat.interventions[head].sent != other.interventions[head].sent for head in heads):
        return False
    return _neutral(first.sampling) == _neutral(again.sampling)


def _neutral(sampling: Sampling) -> Sampling:
    """Return sampling without the settings that a greedy answer does not depend on."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def _head(place: str) -> str:
    return place.partition(".")[0].partition("[")[0]


def _placed(message: str, guard: Guard) -> str:
    """Return a message with each quoted field of `then` under its place."""
    return _QUOTED.sub(
        lambda quoted: f"'{PLACE}.{quoted[1]}{quoted[2]}'" if quoted[1] in guard.then else quoted[0], message
    )
