"""How a question's interventions are said to a Helmsight server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from probes.answering.base import Intervention, Push
from steering import DROP, Contrast, Criterion, Generate, See, Think

_STAGES: dict[type, str] = {See: "see", Think: "think", Generate: "generate"}
_NAMES = {"weight": "lambda"}
"""Options that have another name in the protocol, because the paper's is no name in Python."""


def fields(interventions: Iterable[Intervention]) -> dict[str, Any]:
    """The fields of a request. A stage of SAGE that is not asked for is off there, not at its defaults."""
    said: dict[str, Any] = {}
    for one in interventions:
        if isinstance(one, Contrast):
            said["contrast"] = {"kind": one.kind, **_options(one)}
        else:
            said.setdefault("sage", dict.fromkeys(_STAGES.values(), False))[_STAGES[type(one)]] = _options(one)
    return said


def steering(push: Push, name: str) -> dict[str, Any]:
    """The field of a push by the server's vector of that name."""
    layers = {} if push.layers is None else {"layers": list(push.layers)}
    auto = {"auto": _criterion(push.criterion)} if push.criterion != DROP else {}
    return {"vector": name, "toward": push.toward, "strength": push.strength, **layers, **auto}


def _options(one: Intervention) -> dict[str, Any]:
    return {_NAMES.get(name, name): value for name, value in asdict(one).items() if value is not None}


def _criterion(criterion: Criterion) -> dict[str, Any]:
    given = {"criterion": criterion.name, "bound": criterion.bound, "one_degraded": criterion.one_degraded}
    return {name: value for name, value in given.items() if value is not None}
