"""Fused forms of hooks, registered by the class that they replace; neither the hook nor the decoder knows of them.

A fused form is a subclass of the hook's class that does in one kernel what the hook does step by step. Both share one state,
so that the hook's maker reads the form's measurements from the hook.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from steering.decoder.hooks import AttentionHook, Hook, Hooks
from steering.interventions.pai import AmplifyRows
from steering.interventions.see import SeeRows, measured_of
from steering.triton.attended import Bias, Enhancement

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
    changes = changes_of(hooks)
    if changes is None or (hooks.reading if hooks.weighing else hooks.readers(layer)):
        return None
    bias, gains, weights = changes
    return Terms(
        bias and bias.bias(layer),
        gains and gains.gains(layer, columns),
        weights and weights.enhancement(layer, columns),
    )


def changes_of(hooks: Hooks) -> tuple[Any, Any, Any] | None:
    """Return the adopted hooks that change attention: a `BiasForm`, a `GainsForm` and a `WeightsForm`, each or None.

    The kernels apply them in this order; None where others are among the hooks, or they come in another order.
    """
    remaining = [*hooks.scoring, *hooks.weighing]
    bias, gains, weights = (
        remaining.pop(0) if remaining and isinstance(remaining[0], kind) else None
        for kind in (BiasForm, GainsForm, WeightsForm)
    )
    return None if remaining else (bias, gains, weights)


FORMS = Forms()
"""The forms that attention kernels of any device support."""


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
