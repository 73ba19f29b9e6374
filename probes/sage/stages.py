"""The conditions that SAGE's benchmark compares."""

from __future__ import annotations

import json

from probes.harness.comparison import BASELINE
from steering import Generate, Options, RequestError, See, Think
from steering.interventions.see import READINGS, Reading
from steering.protocol.forms import read
from steering.protocol.intervention import REGISTRY

Stages = dict[str, tuple[Options, ...]]
"""Interventions by the name of the condition."""


def stages(sweep: bool = False) -> Stages:
    """The paper's ablation (its Table 14), stage by stage; SAGE with a mask that is rebuilt, and See in the reading that is
    not the default, both of which the paper leaves open; every other intervention that there is, at its defaults, where it
    has them: the methods that the paper compares with are among them. With `sweep` its Tables 11 to 13, one stage at a
    time."""
    (other,) = set(READINGS) - {See().reading}
    found: Stages = {
        BASELINE: (),
        "+ See": (See(),),
        "+ Think": (See(), Think()),
        "+ Generate": (See(), Think(), Generate()),
        "SAGE, refresh 1": (See(), Think(), Generate(refresh=1)),
        "SAGE, refresh 4": (See(), Think(), Generate(refresh=4)),
        f"See as {other}": (See(reading=other),),
        f"SAGE, See as {other}": (See(reading=other), Think(), Generate()),
    }
    if sweep:
        found |= _sweep(other)
    return found | _others()


def _others() -> Stages:
    """The registered interventions that are no stage of SAGE's and need not be told anything."""
    found: Stages = {}
    for name, (kind, _) in REGISTRY.items():
        if not issubclass(kind, Options) or kind in (See, Think, Generate):
            continue
        if not any(field.is_required() for field in kind.model_fields.values()):
            found[kind.kind.upper() or name] = (kind(),)
    return found


def written(text: str) -> Stages:
    """A condition of the user's own, NAME=JSON, the JSON as in a request to the API; raises ValueError where it is wrong."""
    name, _, fields = text.partition("=")
    try:
        given = json.loads(fields)
        if not isinstance(given, dict):
            raise ValueError("an object is needed")
        asked = read(given)
    except (ValueError, RequestError) as error:
        raise ValueError(f"--condition {name}: {error}") from None
    return {name: asked}


def _sweep(other: Reading) -> Stages:
    """Each stage alone with several settings, See in both of its readings."""
    found: Stages = {
        f"See as {reading}, alpha {alpha:g}": (See(alpha=alpha, reading=reading),)
        for reading in (See().reading, other)
        for alpha in (0.05, 0.1, 0.15, 0.2)
    }
    found |= {f"Think, gamma {gamma:g}": (Think(gamma=gamma),) for gamma in (0.6, 0.7, 0.8, 0.9)}
    return found | {f"Generate, lambda {weight:g}": (Generate(weight=weight),) for weight in (0.25, 0.5, 0.75, 1.0)}
