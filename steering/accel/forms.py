"""Fused forms of hooks, registered by the class that they replace: neither the hook nor the decoder knows of them.

A fused form is a subclass of the hook's class that does in one kernel what the hook does step by step. Both share one state,
so that whoever made the hook reads of it what the form measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from steering.accel.triton.attended import Enhancement
from steering.decoder.hooks import AttentionHook, Hook, Hooks
from steering.interventions.pai import AmplifyRows
from steering.interventions.see import SeeRows, measured_of

F = TypeVar("F", bound=type[Hook])


class Forms:
    """Fused forms by the class of hook that each replaces."""

    def __init__(self, others: Forms | None = None):
        """Begin with the forms of others."""
        self.by_kind: dict[type[Hook], type[Hook]] = {} if others is None else dict(others.by_kind)

    def register(self, kind: type[Hook]) -> Callable[[F], F]:
        """Decorate the form of a class of hooks, its subclass."""

        def registered(form: F) -> F:
            self.by_kind[kind] = form
            return form

        return registered

    def of(self, hook: Hook) -> Hook:
        """Return a hook as its fused form, which has the same state; the hook itself where it has none."""
        form = self.by_kind.get(type(hook))
        if form is None:
            return hook
        fused: Hook = object.__new__(form)
        fused.__dict__ = hook.__dict__
        return fused

    def adopted(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a pass in their fused forms."""
        return Hooks.of(map(self.of, (*hooks.attention, *hooks.layers, *hooks.observers)))


class ScoresForm(AttentionHook):
    """Changes the scores of a decode in a way that attention kernels know."""

    @abstractmethod
    def gains(self, layer: int, columns: int) -> torch.Tensor:
        """(rows, columns), by which scores s are s + gain * |s|."""


class WeightsForm(AttentionHook):
    """Changes weights in a way that attention kernels know."""

    @abstractmethod
    def enhancement(self, layer: int, columns: int) -> Enhancement | None:
        """What kernels are given of a layer; None where its weights are left. Prompts have the fixed alpha alone."""

    @abstractmethod
    def note(self, effect: torch.Tensor) -> None:
        """Receive the statistics that a kernel computed for a layer of a decode, as `Attended.effect`."""


class Terms(NamedTuple):
    """What a decode kernel is given of the hooks of a layer."""

    gains: torch.Tensor | None = None
    enhancement: Enhancement | None = None


def decode_terms(hooks: Hooks, layer: int, columns: int) -> Terms | None:
    """Return what a kernel is given of adopted hooks; None where it does not know what one of them does."""
    if len(hooks.scoring) > 1 or len(hooks.weighing) > 1:
        return None
    gains = enhancement = None
    for hook in hooks.scoring:
        if not isinstance(hook, ScoresForm):
            return None
        gains = hook.gains(layer, columns)
    for hook in hooks.weighing:
        if not isinstance(hook, WeightsForm):
            return None
        enhancement = hook.enhancement(layer, columns)
    return Terms(gains, enhancement)


FORMS = Forms()
"""The forms that attention kernels of any device know."""


@FORMS.register(AmplifyRows)
class FusedAmplify(AmplifyRows, ScoresForm):
    """PAI's amplification, whose gains are those of the hook."""


@FORMS.register(SeeRows)
class FusedSee(SeeRows, WeightsForm):
    """See's enhancement by tables."""

    def enhancement(self, layer: int, columns: int) -> Enhancement | None:
        if not self.generated and layer >= self.depth:
            return None
        own: dict[str, object] = self.__dict__
        if "_fused" not in own:  # once a pass
            own["_fused"] = self.tables(columns)
        tables: Enhancement = own["_fused"]  # type: ignore[assignment]
        return tables

    def note(self, effect: torch.Tensor) -> None:
        self.__dict__.setdefault("_noted", []).append(effect)

    def settle(self, positions: torch.Tensor | None) -> None:
        self.__dict__.pop("_fused", None)
        if noted := self.__dict__.pop("_noted", None):
            self.conclude(noted, positions)
        super().settle(positions)

    def conclude(self, noted: list[torch.Tensor], positions: torch.Tensor | None) -> None:
        """Make of the effects in all layers what is read of the hook."""
        self.measured = measured_of(*torch.stack(noted, 1).unbind(-1))
