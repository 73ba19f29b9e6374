"""Presets: named fields of a request, for clients that can choose a model and nothing else.

`helmsight-demo@sage` is the model `helmsight-demo` with the preset `sage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

from server.engine.served import Capabilities
from server.vectors.names import has, has_defaults
from server.wire.steering import SteeringForm
from steering import Options, Steering, VectorStore
from steering.protocol.forms import KIND
from steering.protocol.intervention import REGISTRY

AT = "@"
"""Separator between the model's name and the preset's."""
VECTOR: str = SteeringForm.model_fields["vector"].default
WAYS: tuple[str, ...] = get_args(SteeringForm.model_fields["toward"].annotation)
ONE_VALUE = ({"max_tokens", "max_completion_tokens"},)
"""Groups of fields that are names of the same value."""


@dataclass(frozen=True)
class Preset:
    """A named set of request fields.

    `fields` are those of a request, as its JSON has them. `source` tells where they are defined, None for a preset that the
    server derives from the model's capabilities.
    """

    name: str
    fields: Mapping[str, Any]
    source: str | None = None

    def weak(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the preset's fields that a request does not set; null counts as absent, but switches off a guard."""
        stated = {name for name, value in body.items() if value is not None or name == "guard"}
        stated |= {name for names in ONE_VALUE if names & stated for name in names}
        return {name: value for name, value in self.fields.items() if name not in stated}


PLAIN = Preset("", {})
"""The preset of the model's own name."""


def built_in(capabilities: Capabilities, store: VectorStore) -> dict[str, Preset]:
    """Return the presets that follow from the model's capabilities.

    They are one for each intervention that needs no options, one for each group of interventions and, if the model has a
    preference vector, one for each direction of steering. A member of a group has the others switched off.
    """
    bodies: dict[str, dict[str, Any]] = {}
    if Steering.name() in capabilities.interventions and has(store, VECTOR, capabilities.fingerprint, preference=True):
        bodies |= {way: {Steering.name(): {"toward": way}} for way in WAYS}
    complete = [
        kind for name, (kind, _) in REGISTRY.items() if name in capabilities.interventions and _is_complete(kind)
    ]
    kinds = [kind for kind in complete if has_defaults(kind, store, capabilities.fingerprint)]
    for kind in kinds:
        head, *tail = kind.path
        if not tail:
            bodies[kind.kind or head] = {head: {KIND: kind.kind} if kind.kind else True}
            continue
        members = [other.path[1] for other, _ in REGISTRY.values() if other.path[0] == head]
        bodies.setdefault(head, {head: True})
        bodies[kind.name()] = {head: {member: member == tail[0] for member in members}}
    return {name: Preset(name, fields) for name, fields in bodies.items()}


def _is_complete(kind: type[Any]) -> TypeGuard[type[Options]]:
    """Return whether an intervention's options all have defaults."""
    return issubclass(kind, Options) and not any(field.is_required() for field in kind.model_fields.values())
