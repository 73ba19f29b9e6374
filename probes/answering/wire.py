"""A question's interventions as fields of a request to a Helmsight server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from probes.answering.base import SIGNS, Push
from steering import DROP, Criterion, Diagnose, Options
from steering.protocol.intervention import REGISTRY
from steering.protocol.readout import readout_options


def fields(interventions: Iterable[Options]) -> dict[str, Any]:
    """Return the fields of a request.

    A member of a group, such as a stage of SAGE, that was not requested is sent as off, since its default there may be on.
    """
    said: dict[str, Any] = {}
    for one in interventions:
        unset = {field.alias or name for name, field in type(one).model_fields.items() if field.default is None}
        given = {name: value for name, value in one.settings().items() if value is not None or name not in unset}
        head, *rest = one.path
        if rest:
            said.setdefault(head, _all_off(head))[rest[0]] = given
        else:
            said[head] = given
    return said


def _all_off(group: str) -> dict[str, Any]:
    paths = [asked.path for asked, _ in REGISTRY.values()]
    return {path[1]: False for path in paths if path[0] == group}


def steering(push: Push, name: str) -> dict[str, Any]:
    """Return the request's field for a push by the server's vector of that name."""
    layers = {} if push.layers is None else {"layers": list(push.layers)}
    if push.toward in SIGNS:
        return {"vectors": [{"name": name, "scale": SIGNS[push.toward] * push.strength, **layers}]}
    auto = {"auto": _criterion(push.criterion)} if push.criterion != DROP else {}
    return {"vector": name, "toward": push.toward, "strength": push.strength, **layers, **auto}


def diagnostics(asked: Diagnose) -> dict[str, Any]:
    """Return the request's field for readouts; raise ValueError for a drift from an answer that no server knows."""
    if asked.earlier is not None:
        raise ValueError("A drift from an answer of this process cannot be asked of a server.")
    options = {name: option for name, option in readout_options().items() if option.written}
    given = {name: option.wire(asked) for name, option in options.items()}
    return {"include": sorted(asked.include)} | {
        name: value for name, value in given.items() if value != options[name].at_rest
    }


def _criterion(criterion: Criterion) -> dict[str, Any]:
    given = {"criterion": criterion.name, "bound": criterion.bound, "one_degraded": criterion.one_degraded}
    return {name: value for name, value in given.items() if value is not None}
