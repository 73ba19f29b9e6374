"""The forms of hooks for compiled steps: by scope, of one shape whatever the rows request, and fused.

A form is registered for the class of `Slots` whose hooks it makes; a pass in which other classes act runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar, get_args

from steering.accel.forms import FORMS, Forms
from steering.accel.traced import TRACED
from steering.decoder.hooks import Hook
from steering.protocol.sequence import Sequence as Row
from steering.protocol.slots import DecodeBatch, PrefillChunk, Slots

Scope = Literal["plain", "usual", "every"]
"""The passes that a compiled step serves: those without hooks on request, those of usual requests, or every one."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
CPU_FORMS = Forms(FORMS)
"""Fused forms of hooks, made of operators for which a compiled step calls our own kernels."""
COMPILED: dict[type[Slots], type[CompiledForm]] = {}
F = TypeVar("F", bound=type["CompiledForm"])


class CompiledForm:
    """Makes the hooks of some `Slots` for compiled steps.

    decodes, prefills: the first scope whose steps have them, None where a pass in which they act runs eagerly.
    """

    decodes: ClassVar[Scope | None] = "every"
    prefills: ClassVar[Scope | None] = "every"

    def __init__(self, slots: Any):
        self.slots = slots
        self._traced = TRACED[type(slots)](slots)

    def scope(self, sequences: list[Row]) -> Scope | None:
        """Return the first scope whose compiled steps do what these sequences ask for their prompts; None without one."""
        return self.prefills

    def plain(self, batch: DecodeBatch) -> Hook | None:
        """Return the hook of a decode whose measurements are counted after the pass."""
        return self._traced.decode(batch)

    def decode(self, batch: DecodeBatch) -> Hook | None:
        """Return the hook of a decode whose measurements are counted within the pass."""
        return self.plain(batch)

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        """Return the hook of a pass of prompts."""
        raise NotImplementedError

    def draw(self) -> None:
        """Turn the slots' random numbers from 0 to 1/2 into valid contents, for trying a compiled step."""

    @property
    def name(self) -> str:
        """The name of the slots."""
        name: str = self.slots.name
        return name


def compiles(kind: type[Slots]) -> Callable[[F], F]:
    """Decorate the form for a class of slots."""

    def registered(form: F) -> F:
        COMPILED[kind] = form
        return form

    return registered


def forms_of(parts: Sequence[Slots], kind: str, scope: Scope) -> list[CompiledForm]:
    """Return the forms of those slots whose hooks a compiled step has, in the order in which they act."""
    forms = [COMPILED[type(part)](part) for part in parts if type(part) in COMPILED]
    first = [(form, form.prefills if kind == "prefill" else form.decodes) for form in forms]
    return [form for form, least in first if least is not None and SCOPES.index(least) <= SCOPES.index(scope)]
