"""The registry of recorders: each captures some signals, in every slot that needs them."""

from __future__ import annotations

from steering.protocol.signals import StepGauge
from steering.protocol.slots import Slots

REGISTRY: dict[str, type[Slots]] = {}
"""Every recorder by the name under which it leaves what it captured."""


def register(name: str, slots: type[Slots]) -> None:
    """Make a recorder known to the engine; raise ValueError where its name is taken."""
    if name in REGISTRY:
        raise ValueError(f"There is a recorder {name!r} already.")
    REGISTRY[name] = slots


def gauges() -> dict[str, StepGauge]:
    """Return the numbers that recorders measure at every step, by name."""
    return {name: gauge for slots in REGISTRY.values() for name, gauge in slots.gauges.items()}
