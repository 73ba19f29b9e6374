"""The hooks of `Slots` for steps that are recorded once and run for many batches, registered by class.

Most such hooks have one shape, whatever the rows request, and hold views of the slots' tensors. A step in which an
unregistered class acts runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from steering.accel.tensors import Bound
from steering.decoder.hooks import Hook
from steering.interventions.dola import DolaRows, DolaSlots
from steering.interventions.look_at import LookAtSlots
from steering.interventions.pai import PaiSlots
from steering.interventions.project_out import ProjectOutRows, ProjectOutSlots
from steering.interventions.published.only import OnlySlots
from steering.interventions.published.opera import OperaSlots
from steering.interventions.published.vista import VistaSlots
from steering.interventions.see import SeeSlots
from steering.interventions.steer_rows import SteerSlots
from steering.interventions.think import ThinkSlots
from steering.protocol.slots import DecodeBatch, Slots
from steering.recorders.activations import ActivationsRecorder
from steering.recorders.attention import AttentionRecorder
from steering.recorders.residual import ResidualRecorder

HooksByName = dict[str, Hook | None]
"""Hooks by the names of their slots."""
T = TypeVar("T", bound=type["Traced"])


class Traced:
    """Makes the hooks of some `Slots` for recorded steps; by default those that the slots make themselves.

    lasting: the hooks are kept for later batches of as many rows.
    """

    lasting: ClassVar[bool] = True

    def __init__(self, slots: Any):
        self.slots = slots

    @property
    def name(self) -> str:
        """The name of the slots."""
        name: str = self.slots.name
        return name

    def decode(self, batch: DecodeBatch) -> Hook | None:
        """Return the hook of a decode, neutral in rows that do not ask for it."""
        hook: Hook | None = self.slots.decode(batch)
        return hook


TRACED: dict[type[Slots], type[Traced]] = dict.fromkeys(
    (SteerSlots, ThinkSlots, PaiSlots, OperaSlots, AttentionRecorder, ResidualRecorder), Traced
)
"""The makers of hooks by the class of slots, without its subclasses."""


def traces(kind: type[Slots]) -> Callable[[T], T]:
    """Decorate the maker of hooks for a class of slots."""

    def registered(builder: T) -> T:
        TRACED[kind] = builder
        return builder

    return registered


@traces(SeeSlots)
class TracedSee(Traced):
    """Makes See's hook as if one row had every layer deep, and another one every layer shallow."""

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook: Hook = self.slots.rows(batch.rows, (self.slots.pool.layers, 0), generated=True)
        return hook


@traces(LookAtSlots)
class TracedLookAt(Traced):
    """Makes the hook of `look_at` as if scores were biased in every layer."""

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook: Hook = self.slots.rows(batch.rows, tuple(range(self.slots.pool.layers)))
        return hook


@traces(ProjectOutSlots)
class TracedProjectOut(Traced):
    """Makes the hook of `project_out` as if a direction were removed in every layer."""

    def decode(self, batch: DecodeBatch) -> Hook | None:
        slots: ProjectOutSlots = self.slots
        return ProjectOutRows(
            slots.directions[batch.rows], slots.generated[batch.rows], tuple(range(slots.pool.layers))
        )


@traces(DolaSlots)
class TracedDola(Traced):
    """Makes DoLa's hook as if every state were a candidate."""

    def decode(self, batch: DecodeBatch) -> Hook | None:
        return DolaRows(list(range(self.slots.pool.layers)), None)


@traces(VistaSlots)
class TracedVista(Traced):
    """Makes VISTA's hook, which has one shape for each choice of layers: none is kept, as there may be many."""

    lasting = False


@traces(OnlySlots)
class TracedOnly(Traced):
    """Makes ONLY's hook, which has one shape for each choice of layers, and holds the batch's positions."""

    lasting = False


@traces(ActivationsRecorder)
class TracedActivations(Traced):
    """Makes the hook that reads states, which has one shape for each choice of layers."""

    lasting = False


def traced_of(parts: Sequence[Slots]) -> list[Traced] | None:
    """Return the makers of these slots' hooks; None where some cannot be recorded."""
    kinds = [TRACED.get(type(part)) for part in parts]
    if None in kinds:
        return None
    return [kind(part) for kind, part in zip(kinds, parts, strict=True) if kind is not None]


def bound_of(hooks: HooksByName) -> Bound:
    """Return the hooks that are not None as one list of tensors."""
    return Bound([hook for hook in hooks.values() if hook is not None])


class KnownHooks:
    """The hooks of recorded decodes.

    Where all rows are active they are made only once, because a step is short: they hold views of tensors that live as long
    as their slots.
    """

    def __init__(self) -> None:
        self._bound_hooks: dict[tuple[tuple[str, ...], int], tuple[HooksByName, Bound]] = {}

    def of(
        self, batch: DecodeBatch, names: Sequence[str], make: Callable[[], HooksByName], lasting: bool = True
    ) -> tuple[HooksByName, Bound]:
        """Return the hooks of slots of these names for a batch, made by `make`; they are kept if `lasting`."""
        place = tuple(names), len(batch.sequences)
        steady = lasting and not any(sequence.held for sequence in batch.sequences)
        if steady and place in self._bound_hooks:
            return self._bound_hooks[place]
        hooks = make()
        entry = hooks, bound_of(hooks)
        if steady:
            self._bound_hooks[place] = entry
        return entry
