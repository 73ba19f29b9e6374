"""The forms of recorders' hooks in compiled steps."""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.cpu.forms.base import CPU_FORMS, CompiledForm, Scope, compiles
from steering.cpu.kernels.counts import count_attention
from steering.cpu.kernels.stream import count_stream, stream_looks
from steering.decoder.hooks import Hook
from steering.protocol.sequence import Sequence
from steering.protocol.slots import DecodeBatch, PrefillChunk
from steering.recorders.attention import AttentionRecorder, DecodeCapture, capture_rows
from steering.recorders.residual import ResidualRecorder, ResidualRows


@CPU_FORMS.register(DecodeCapture)
class FusedCapture(DecodeCapture):
    """Counts a decode's attention in one operator."""

    def settle(self, positions: torch.Tensor | None) -> None:
        if self.counts is None or positions is None:
            super().settle(positions)
        else:
            self.means = count_attention(self.gathered(), self._spans, positions, *self.counts)


@compiles(AttentionRecorder)
class AttentionForm(CompiledForm):
    """Reads all groups, patches and maps. In float32, the kernel that reads rows also chooses them."""

    decodes: ClassVar[Scope | None] = "usual"
    prefills: ClassVar[Scope | None] = "usual"

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook = self.plain(batch)
        assert isinstance(hook, DecodeCapture)
        hook.counts = self.slots.counts(batch)
        return hook

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        slots: AttentionRecorder = self.slots
        short = chunk.width <= capture_rows(slots.pool.device) or slots.pool.mllm.dtype == torch.float32
        return slots.capture(chunk, by_patch=True, mapped=True, at_once=short)


@CPU_FORMS.register(ResidualRows)
class FusedResidual(ResidualRows):
    """Measures and counts the residual stream of all layers in one operator."""

    looks = staticmethod(stream_looks)

    def settle(self, positions: torch.Tensor | None) -> None:
        if self.counts is None or positions is None:
            super().settle(positions)
        else:
            count_stream(*self.gathered(), positions, *self.counts)


@compiles(ResidualRecorder)
class ResidualForm(CompiledForm):
    """Reads only the last row of each prompt."""

    def scope(self, sequences: list[Sequence]) -> Scope | None:
        reads_prompt = any(
            sequence.spec.diagnose is not None and sequence.spec.diagnose.residual_rows == "prompt"
            for sequence in sequences
        )
        return None if reads_prompt else self.prefills

    def decode(self, batch: DecodeBatch) -> Hook | None:
        hook = self.plain(batch)
        assert isinstance(hook, ResidualRows)
        hook.counts = self.slots.counts(batch)
        return hook

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        slots: ResidualRecorder = self.slots
        return slots.rows(chunk)
