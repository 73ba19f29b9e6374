"""The registry of interventions (options and slots), and preludes: interventions that other requests decide first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace

from steering.model.mllm import MLLM
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.request import Request, Result
from steering.protocol.slots import Slots
from steering.protocol.wording import check_name

REGISTRY: dict[str, tuple[type[InterventionSpec], type[Slots] | None]] = {}
"""Every intervention by name, in the order in which they act."""


def register(spec: type[InterventionSpec], slots: type[Slots] | None = None) -> None:
    """Make an intervention known to requests, engine, reports, metrics, journal and catalogue.

    `spec` is its options; `slots` keeps its state, if it has any. Raises ValueError where its name or its place in a
    request is taken or invalid.
    """
    if not 1 <= len(spec.path) <= 2:
        raise ValueError(f"The path of {spec.__name__} must have one name or two; got {spec.path!r}.")
    for name in (*spec.path, *([spec.kind] if spec.kind else ())):
        check_name(name, f"The names in the path and the kind of {spec.__name__}")
    for other, _ in REGISTRY.values():
        if other.name() == spec.name():
            raise ValueError(f"There is an intervention {spec.name()!r} already.")
        if other.path == spec.path and not (other.kind and spec.kind):
            raise ValueError(f"Interventions that share the path {'.'.join(spec.path)!r} need a kind each.")
        if len(other.path) != len(spec.path) and other.path[0] == spec.path[0]:
            raise ValueError(f"{spec.path[0]!r} cannot be both an intervention and a group of them.")
    REGISTRY[spec.name()] = (spec, slots)


def applied(interventions: Mapping[str, InterventionSpec], measured: Mapping[str, object]) -> dict[str, object] | None:
    """Return the `applied` report of an answer: what each intervention did, by its path.

    None when no intervention was asked for. A group with at least one active member lists all members, None where they are
    off.
    """
    return by_path(interventions, lambda name, intervention: intervention.report(measured.get(name))) or None


def by_path(
    interventions: Mapping[str, InterventionSpec], value: Callable[[str, InterventionSpec], object]
) -> dict[str, object]:
    """Return a value of each intervention, made from its name and options, arranged by path as `applied` is."""
    report: dict[str, object] = {}
    for name, (kind, _) in REGISTRY.items():
        own = value(name, interventions[name]) if name in interventions else None
        head, *tail = kind.path
        if not tail:
            if name in interventions:
                report[head] = own
        elif any(other.path[0] == head for other in interventions.values()):
            group = report.setdefault(head, {})
            assert isinstance(group, dict)
            group[tail[0]] = own
    return report


# -- interventions that depend on what the model says first ---------------------------------------------------------------

Rounds = Generator[Iterable[Request], list[Result], InterventionSpec]
"""Requests that run together, then their results, as often as needed; finally the intervention that follows from them."""


class Prelude(InterventionSpec):
    """A placeholder in a request for the intervention that its `rounds` end with.

    An engine takes no request that still has one: `steering.decide` runs it, and a server does so too.
    """

    @abstractmethod
    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        """Yield the requests of each round and return the intervention.

        The intervention may have another kind and another place; its report holds the measurements. Raises RequestError or
        Inapplicable, before anything runs, where the request has no place for it. `request` is the one that asks; render and
        cache prompts as it does (`RENDERED_BY`, `cache_salt`).
        """


def next_prelude(request: Request) -> Prelude | None:
    """Return the first undecided prelude of a request; None where there is none."""
    return next((intervention for intervention in request.asked.values() if isinstance(intervention, Prelude)), None)


def in_place_of(request: Request, prelude: Prelude, decided: Sequence[InterventionSpec] = ()) -> Request:
    """Return the request with other interventions in place of a prelude."""
    interventions: list[InterventionSpec] = []
    for intervention in request.asked.values():
        interventions += decided if intervention is prelude else [intervention]
    return replace(request, interventions=interventions)
