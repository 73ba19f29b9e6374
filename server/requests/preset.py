"""A preset: fields of a request under a name, for clients that can choose a model and nothing else. `helmsight-demo@sage` is
the model `helmsight-demo` with the preset `sage`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

from server.engine.served import Capabilities
from server.vectors.names import has, known
from server.wire.steering import SteeringForm
from steering import Options, Steering, VectorStore
from steering.protocol.forms import KIND
from steering.protocol.intervention import REGISTRY

AT = "@"
"""Between the model's name and the preset's."""
VECTOR: str = SteeringForm.model_fields["vector"].default
WAYS: tuple[str, ...] = get_args(SteeringForm.model_fields["toward"].annotation)
ONE_VALUE = ({"max_tokens", "max_completion_tokens"},)
"""Fields that are names of one value."""


@dataclass(frozen=True)
class Preset:
    """What a name stands for. fields: of a request, as its JSON has them. source: where it was written, None for one that
    the server makes of what the model can do."""

    name: str
    fields: Mapping[str, Any]
    source: str | None = None

    def weak(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Those of its fields that a request does not give; null is as good as absent."""
        given = {name for name, value in body.items() if value is not None}
        given |= {name for names in ONE_VALUE if names & given for name in names}
        return {name: value for name, value in self.fields.items() if name not in given}


PLAIN = Preset("", {})
"""What the model's own name stands for."""


def built_in(able: Capabilities, store: VectorStore) -> dict[str, Preset]:
    """A preset for each intervention that can be asked for and needs nothing to be said of it, for each group of them with
    its members alone, and, where the model has a vector for them, for each way to steer."""
    asked: dict[str, dict[str, Any]] = {}
    if Steering.name() in able.interventions and has(store, VECTOR, able.fingerprint, preference=True):
        asked |= {way: {Steering.name(): {"toward": way}} for way in WAYS}
    whole = [kind for name, (kind, _) in REGISTRY.items() if name in able.interventions and _is_complete(kind)]
    kinds = [kind for kind in whole if known(kind, store, able.fingerprint)]
    for kind in kinds:
        head, *rest = kind.path
        if not rest:
            asked[kind.kind or head] = {head: {KIND: kind.kind} if kind.kind else True}
            continue
        members = [other.path[1] for other, _ in REGISTRY.values() if other.path[0] == head]
        asked.setdefault(head, {head: True})
        asked[kind.name()] = {head: {member: member == rest[0] for member in members}}
    return {name: Preset(name, fields) for name, fields in asked.items()}


def _is_complete(kind: type[Any]) -> TypeGuard[type[Options]]:
    """Whether all defaults make a request of it."""
    return issubclass(kind, Options) and not any(field.is_required() for field in kind.model_fields.values())
