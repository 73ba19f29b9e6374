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
    body: dict[str, Any] = {}
    for intervention in interventions:
        unset = {
            field.alias or name for name, field in type(intervention).model_fields.items() if field.default is None
        }
        settings = {
            name: value for name, value in intervention.settings().items() if value is not None or name not in unset
        }
        head, *tail = intervention.path
        if tail:
            body.setdefault(head, _all_off(head))[tail[0]] = settings
        else:
            body[head] = settings
    return body


def _all_off(group: str) -> dict[str, Any]:
    paths = [intervention.path for intervention, _ in REGISTRY.values()]
    return {path[1]: False for path in paths if path[0] == group}


def steering(push: Push, name: str) -> dict[str, Any]:
    """Return the request's field for a push by the server's vector of that name."""
    layers = {} if push.layers is None else {"layers": list(push.layers)}
    if push.toward in SIGNS:
        return {"vectors": [{"name": name, "scale": SIGNS[push.toward] * push.strength, **layers}]}
    auto = {"auto": _criterion(push.criterion)} if push.criterion != DROP else {}
    return {"vector": name, "toward": push.toward, "strength": push.strength, **layers, **auto}


def diagnostics(diagnose: Diagnose) -> dict[str, Any]:
    """Return the request's field for readouts; raise ValueError for a drift from an answer that no server knows."""
    if diagnose.earlier is not None:
        raise ValueError("A drift from an answer of this process cannot be asked of a server.")
    options = {name: option for name, option in readout_options().items() if option.written}
    values = {name: option.wire(diagnose) for name, option in options.items()}
    return {"include": sorted(diagnose.include)} | {
        name: value for name, value in values.items() if value != options[name].at_rest
    }


def _criterion(criterion: Criterion) -> dict[str, Any]:
    values = {"criterion": criterion.name, "bound": criterion.bound, "one_degraded": criterion.one_degraded}
    return {name: value for name, value in values.items() if value is not None}
