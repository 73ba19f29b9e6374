"""The forms of interventions' hooks in compiled steps."""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.accel.forms import FusedSee
from steering.cpu.forms.base import CPU_FORMS, CompiledForm, Scope, compiles
from steering.cpu.kernels.counts import count_damping, note_enhancement
from steering.cpu.kernels.stream import damping
from steering.decoder.hooks import Hook
from steering.interventions.pai import PaiSlots
from steering.interventions.see import READINGS, See, SeeRows, SeeSlots
from steering.interventions.steer_rows import SteerSlots
from steering.interventions.think import ThinkRows, ThinkSlots
from steering.protocol.sequence import Sequence
from steering.protocol.slots import DecodeBatch, PrefillChunk


@compiles(SteerSlots)
class SteerForm(CompiledForm):
    """Adds vectors to generated tokens in all steps; in prompts they depend on the token's class, and are measured."""

    decodes: ClassVar[Scope | None] = "plain"
    prefills: ClassVar[Scope | None] = "usual"

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        slots: SteerSlots = self.slots
        return slots.rows(chunk, tuple(range(slots.pool.layers)))


@compiles(PaiSlots)
class PaiForm(CompiledForm):
    """Amplifies decodes; for prompts it would need the last rows computed by themselves."""

    prefills: ClassVar[Scope | None] = None


@CPU_FORMS.register(SeeRows)
class NotedSee(FusedSee):
    """Writes the effects of all layers in one operator."""

    def conclude(self, noted: list[torch.Tensor], positions: torch.Tensor | None) -> None:
        if self.steps is None or positions is None:
            super().conclude(noted, positions)
        else:
            note_enhancement(noted, positions, self.steps)


@compiles(SeeSlots)
class SeeForm(CompiledForm):
    """Enhances, in prompts, the default number of shallow layers."""

    @property
    def _usual_depth(self) -> int:
        return See().depth(self.slots.pool.layers)

    def scope(self, sequences: list[Sequence]) -> Scope | None:
        deepest = max(self.slots.depths(sequences), default=0)
        return self.prefills if deepest <= self._usual_depth else None

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook = self.plain(batch)
        assert isinstance(hook, SeeRows)
        hook.steps = self.slots.steps[batch.rows]
        return hook

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        slots: SeeSlots = self.slots
        return slots.rows(chunk.rows, (self._usual_depth, self._usual_depth), generated=False)

    def draw(self) -> None:
        """Make each column an image's, the text's or neither, and give the slots every reading."""
        visual, text = (self.slots.masks > 0.25).unbind(-1)
        self.slots.masks.copy_(torch.stack([visual, text & ~visual], -1))
        self.slots.reading.copy_((torch.arange(len(self.slots.reading)) + 1) % len(READINGS))


@CPU_FORMS.register(ThinkRows)
class FusedThink(ThinkRows):
    """Measures an update in one operator, and counts all layers in another one."""

    damping = staticmethod(damping)

    def settle(self, positions: torch.Tensor | None) -> None:
        if self.counts is None or positions is None:
            super().settle(positions)
        else:
            count_damping(self.gathered(), positions, *self.counts)


@compiles(ThinkSlots)
class ThinkForm(CompiledForm):
    """Damps updates, and measures how far they diverge."""

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook = self.plain(batch)
        assert isinstance(hook, ThinkRows)
        hook.counts = self.slots.counts(batch)
        return hook

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        slots: ThinkSlots = self.slots
        return slots.rows(chunk)
