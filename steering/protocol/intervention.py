"""The interventions that there are: what may be asked, and what it does in every slot."""

from __future__ import annotations

from collections.abc import Mapping

from steering.protocol.asked import Asked
from steering.protocol.slots import Slots

REGISTRY: dict[str, tuple[type[Asked], type[Slots] | None]] = {}
"""Every intervention by name, in the order in which they act."""


def register(asked: type[Asked], slots: type[Slots] | None = None) -> None:
    """Make an intervention known to requests, engine, reports, metrics, journal and catalogue: what may be asked of it, and
    what keeps its state, if any. Raises ValueError where its name is taken."""
    if asked.name() in REGISTRY:
        raise ValueError(f"There is an intervention {asked.name()!r} already.")
    REGISTRY[asked.name()] = (asked, slots)


def applied(asked: Mapping[str, Asked], taken: Mapping[str, object]) -> dict[str, object] | None:
    """The `applied` report of an answer, None when no intervention was asked for: what each did by its path; of a group
    that something was asked of, all members, None where they are off."""
    report: dict[str, object] = {}
    for name, (kind, _) in REGISTRY.items():
        said = asked[name].report(taken.get(name)) if name in asked else None
        head, *rest = kind.path
        if not rest:
            if name in asked:
                report[head] = said
        elif any(other.path[0] == head for other in asked.values()):
            group = report.setdefault(head, {})
            assert isinstance(group, dict)
            group[rest[0]] = said
    return report or None
