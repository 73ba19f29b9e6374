"""Fused forms of hooks, registered by the class that they replace; neither the hook nor the decoder knows of them.

A fused form is a subclass of the hook's class that does in one kernel what the hook does step by step. Both share one state,
so that the hook's maker reads the form's measurements from the hook.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch

from steering.accel.triton.attended import Bias, Enhancement
from steering.decoder.hooks import AttentionHook, Hook, Hooks
from steering.interventions.look_at import LookAtRows
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
        return Hooks.of(map(self.of, hooks.every))


class BiasForm(AttentionHook):
    """Adds to the scores of a decode what attention kernels of GPUs support."""

    @abstractmethod
    def bias(self, layer: int) -> Bias | None:
        """Return what is added to the scores of a layer; None where nothing is."""


class GainsForm(AttentionHook):
    """Changes the scores of a decode in a way that attention kernels support."""

    @abstractmethod
    def gains(self, layer: int, columns: int) -> torch.Tensor:
        """Return the gains (rows, columns), which change scores s to s + gain * |s|."""


class WeightsForm(AttentionHook):
    """Changes weights in a way that attention kernels support."""

    @abstractmethod
    def enhancement(self, layer: int, columns: int) -> Enhancement | None:
        """Return the kernels' arguments for a layer; None where its weights are unchanged. Prompts use a fixed alpha."""

    @abstractmethod
    def note(self, effect: torch.Tensor) -> None:
        """Receive the statistics that a kernel computed for a layer of a decode, as `Attended.effect`."""


class Terms(NamedTuple):
    """The arguments of a decode kernel from the hooks of a layer."""

    bias: Bias | None = None
    gains: torch.Tensor | None = None
    enhancement: Enhancement | None = None


def decode_terms(hooks: Hooks, layer: int, columns: int) -> Terms | None:
    """Return a kernel's arguments for adopted hooks; None where one of them is unknown to it, or reads the layer.

    A form measures what it does in all layers together, so beside a hook that reads one of them no kernel runs in any.
    """
    if not _are_known(hooks) or any(hooks.weighing or hook.reads(layer) for hook in hooks.reading):
        return None
    bias = gains = enhancement = None
    for hook in hooks.attention:
        if isinstance(hook, BiasForm):
            bias = hook.bias(layer)
        elif isinstance(hook, GainsForm):
            gains = hook.gains(layer, columns)
        elif isinstance(hook, WeightsForm):
            enhancement = hook.enhancement(layer, columns)
    return Terms(bias, gains, enhancement)


def suits_kernel(hooks: Iterable[Hook | None]) -> bool:
    """Return True where a GPU's kernel can compute the attention of every layer under these hooks."""
    points = Hooks.of(hooks)
    return not points.attention or (not points.reading and _are_known(FORMS.adopted(points)))


def _are_known(hooks: Hooks) -> bool:
    """Return True where kernels support what adopted hooks change: at most one of each form, the bias before the gains."""
    scoring = [next((kind for kind in (BiasForm, GainsForm) if isinstance(hook, kind)), None) for hook in hooks.scoring]
    if scoring not in ([], [BiasForm], [GainsForm], [BiasForm, GainsForm]) or len(hooks.weighing) > 1:
        return False
    return all(isinstance(hook, WeightsForm) for hook in hooks.weighing)


FORMS = Forms()
"""The forms of hooks for attention kernels of GPUs, and most of them for those of CPUs."""


@FORMS.register(LookAtRows)
class FusedLookAt(LookAtRows, BiasForm):
    """The form of `look_at`, with the hook's bias."""


@FORMS.register(AmplifyRows)
class FusedAmplify(AmplifyRows, GainsForm):
    """The form of PAI's amplification, with the hook's gains."""


@FORMS.register(SeeRows)
class FusedSee(SeeRows, WeightsForm):
    """The form of See's enhancement, by tables."""

    def enhancement(self, layer: int, columns: int) -> Enhancement | None:
        if not self.generated and layer >= self.depth:
            return None
        attributes: dict[str, object] = self.__dict__
        if "_fused" not in attributes:  # once a pass
            attributes["_fused"] = self.tables(columns)
        tables: Enhancement = attributes["_fused"]  # type: ignore[assignment]
        return tables

    def note(self, effect: torch.Tensor) -> None:
        self.__dict__.setdefault("_noted", []).append(effect)

    def settle(self, positions: torch.Tensor | None) -> None:
        self.__dict__.pop("_fused", None)
        if noted := self.__dict__.pop("_noted", None):
            self.conclude(noted, positions)
        super().settle(positions)

    def conclude(self, noted: list[torch.Tensor], positions: torch.Tensor | None) -> None:
        """Compute the hook's measurements from the effects in all layers."""
        self.measured = measured_of(*torch.stack(noted, 1).unbind(-1))
