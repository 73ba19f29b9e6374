"""Attention summed by slot, in the prompt and during the answer.

Layers are those with softmax attention: one with linear attention or a convolution has no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from steering.decoder.hooks import Hook, Observer, Weights
from steering.decoder.ranks import ALONE, Ranks
from steering.devices import fill_slot, to_device
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal, StepGauge
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.recorders.counting import NEVER, newly
from steering.recorders.spans import AFTER, BEFORE, GAUGES, source_shares, span_count, span_sources, step_numbers

NAME = "attention"
QUESTIONS, MODALITY, ANCHORS = range(3)
"""Groups of captured prefill rows: of the question, those that see all images, and also text context; of the last image."""
CAPTURE_ROWS, GPU_CAPTURE_ROWS = 128, 512
"""Prefill rows whose attention weights exist at once while they are reduced, where no kernel does that.

On a CPU as many as fit its caches, on a GPU, where every launch costs time, as fit its memory.
"""
SIGNALS = frozenset({Signal.SPANS, Signal.LAST, Signal.ANCHOR, Signal.DECAY, Signal.PATCHES, Signal.MAP, Signal.STEPS})
DECODED = (Signal.SPANS, Signal.DECAY, Signal.PATCHES, Signal.STEPS)
"""Signals to which generated tokens add."""


def capture_rows(device: torch.device) -> int:
    """Return the number of rows that are reduced together."""
    return CAPTURE_ROWS if device.type == "cpu" else GPU_CAPTURE_ROWS


class AttentionCounts(NamedTuple):
    """The tensors in which a decode's attention is counted.

    sources: (rows, spans, 3). active, counted: as in `recorders.counting`. sums: (rows, layers, spans), attention by span.
    decay: (rows, length, layers, 3), the `source_shares` at the column that each row writes. patches: (rows, layers,
    length), attention by column.
    """

    sources: torch.Tensor
    active: torch.Tensor
    counted: torch.Tensor
    sums: torch.Tensor
    decay: torch.Tensor
    patches: torch.Tensor


def add_attention(means: torch.Tensor, spans: torch.Tensor, positions: torch.Tensor, counts: AttentionCounts) -> None:
    """Add a decode's attention to `counts`.

    means: (rows, layers, columns). spans: (rows, length, spans), 1 where a column belongs to a span.
    """
    rows, columns = torch.arange(len(positions), device=positions.device), means.shape[2]
    new = newly(positions, counts.active, counts.counted)[:, None, None]
    by_span = means @ spans[:, :columns]
    counts.sums.add_(torch.where(new, by_span, 0.0))
    shares = source_shares(by_span, counts.sources)
    counts.decay[rows, positions] = torch.where(new, shares, counts.decay[rows, positions])
    counts.patches[:, :, :columns].add_(torch.where(new, means, 0.0))


class RowCounts(NamedTuple):
    """The numbers of query rows averaged over: of the question, generated, and the prompt's last if there are no others."""

    question: int
    output: int
    last: int

    @classmethod
    def of(cls, question: int, output: int) -> RowCounts:
        return cls(question, output, int(question + output == 0))


@dataclass(frozen=True)
class Attention:
    """An answer's attention, on the CPU; spans are numbered as in `prompt.spans`, patches image by image.

    sums: (layers, spans), mean over heads, summed over `rows`. modality: the same over `modality_rows`. decay: (steps,
    layers, 3), shares of vision, system and user text at each generated token. anchor: (layers, spans), summed over the last
    image's rows. patches: (layers, patches), as `sums` by image token.
    """

    sums: torch.Tensor
    rows: RowCounts
    modality: torch.Tensor
    modality_rows: RowCounts
    decay: torch.Tensor
    anchor: torch.Tensor
    patches: torch.Tensor


@dataclass
class PromptAttention:
    """The attention of a sequence's prompt.

    sums: (layers, groups, spans) of its rows. last_sums: (layers, spans) and last_patches: (layers, columns), of its last
    row. map: (columns,), of the row before the latest mask, mean over the focus layers.
    """

    sums: torch.Tensor
    last_sums: torch.Tensor | None = None
    last_patches: torch.Tensor | None = None
    map: torch.Tensor | None = None


class PrefillCapture(Observer):
    """Captures the attention of chosen query rows of a prefill, mean over heads.

    spans: (rows, length, S), 1 where a column belongs to a span. rows: (rows, R), query indices in the chunk. groups: (rows,
    3, R), 1 on those of each group. last: (rows,), each prompt's last row, where the chunk holds it. It is reduced on its
    own: See and Generate use it, and must not depend on what else is captured. maps_from: the first of the layers whose
    weights of the last row are summed, None where no row needs that.

    Once settled, `sums` (layers, rows, 3, S) are the groups' by span, `patches` (layers, rows, columns) those of `QUESTIONS`
    by column if `by_patch`, and `last_sums` (layers, rows, S), `last_patches` (layers, rows, columns) and `maps` (rows,
    columns) the last row's.
    """

    sums: torch.Tensor
    patches: torch.Tensor | None = None
    last_sums: torch.Tensor | None = None
    last_patches: torch.Tensor | None = None
    maps: torch.Tensor | None = None

    def __init__(
        self,
        spans: torch.Tensor,
        rows: torch.Tensor,
        groups: torch.Tensor,
        last: torch.Tensor | None,
        by_patch: bool,
        maps_from: int | None,
        at_once: bool,
        ranks: Ranks = ALONE,
    ):
        self._spans, self._rows, self._groups, self._last = spans, rows, groups, last
        self._by_patch, self._maps_from, self._at_once, self._ranks = by_patch, maps_from, at_once, ranks
        self._grouped: list[torch.Tensor] = []
        self._of_last: list[torch.Tensor] = []

    def prefill(self, layer: int, weights: Weights, columns: int) -> None:
        if self._at_once:
            self._grouped.append(weights.grouped(self._rows, self._groups))
        elif not self._rows.shape[1]:  # the requested rows came from the prefix cache
            self._grouped.append(self._groups.new_zeros(*self._groups.shape[:2], columns))
        else:
            most = capture_rows(self._rows.device)
            parts = zip(self._rows.split(most, 1), self._groups.split(most, 2), strict=True)
            self._grouped.append(sum(itertools.starmap(weights.grouped, parts)))  # type: ignore[arg-type]
        if self._last is not None:
            alone = torch.ones_like(self._last, dtype=self._groups.dtype)[:, None, None]
            self._of_last.append(weights.grouped(self._last[:, None], alone))

    def settle(self, positions: torch.Tensor | None) -> None:
        by_group = self._ranks.mean(torch.stack(self._grouped))
        spans = self._spans[:, : by_group.shape[3]]
        self.sums = by_group @ spans
        self.patches = by_group[:, :, QUESTIONS] if self._by_patch else None
        if self._of_last:
            last = self._ranks.mean(torch.stack(self._of_last))  # (layers, rows, 1, columns)
            self.last_sums = (last @ spans)[:, :, 0]
            self.last_patches = last[:, :, 0] if self._by_patch else None
            self.maps = None if self._maps_from is None else last[self._maps_from :, :, 0].sum(0)
        self._grouped, self._of_last = [], []


class DecodeCapture(Observer):
    """Captures the attention of the one query of each row, mean over heads.

    spans: (rows, length, S), 1 where a column belongs to a span. Once settled, `means` (rows, layers, columns) is the
    attention by column. counts: the tensors in which it was already counted then, None where that is still to be done.
    """

    means: torch.Tensor
    counts: AttentionCounts | None = None

    def __init__(self, spans: torch.Tensor, ranks: Ranks = ALONE):
        self._spans, self._ranks = spans, ranks
        self._by_layer: list[torch.Tensor] = []

    def decode(self, layer: int, means: torch.Tensor) -> None:
        self._by_layer.append(means.to(self._spans.device))

    def gathered(self) -> list[torch.Tensor]:
        """Return the means by layer, (rows, columns) each, and release them."""
        means, self._by_layer = self._by_layer, []
        return means if self._ranks.size == 1 else [*self._ranks.mean(torch.stack(means)).contiguous()]

    def settle(self, positions: torch.Tensor | None) -> None:
        self.means = torch.stack(self.gathered(), 1)


class AttentionRecorder(Slots):
    """Attention by span, by step and by column; only the requested parts are computed.

    spans: (slots, length, spans), 1 where a column belongs to a span, `BEFORE` and `AFTER` included. sums: (slots, layers,
    spans), over the rows of generated tokens. decay: (slots, length, layers, 3), shares at each column. sources: (slots,
    spans, 3), `span_sources` in every slot. patches: (slots, layers, length), attention by column, the question's rows
    included. counted: (slots,), the last column of each slot that is included in the sums. tokens: (slots, spans), of each
    span.
    """

    measured: ClassVar[tuple[str, ...]] = ("patches",)
    signals: ClassVar[frozenset[Signal]] = SIGNALS
    gauges: ClassVar[Mapping[str, StepGauge]] = GAUGES

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, length, layers, device = pool.slots, pool.length, len(pool.mllm.attention_layers), pool.device
        spans = span_count(pool.max_images)
        self.spans = torch.zeros(slots, length, spans, device=device)
        self.sums = torch.zeros(slots, layers, spans, device=device)
        self.decay = torch.zeros(slots, length, layers, 3, device=device)
        self.sources = span_sources(spans).to(device).repeat(slots, 1, 1)
        self.patches = torch.zeros(slots, layers, length, device=device)
        self.counted = torch.full((slots,), NEVER, device=device)
        self.tokens = torch.zeros(slots, spans, device=device)

    def place(self, sequence: Sequence) -> None:
        slot = sequence.slot
        for tensor in (self.spans, self.sums, self.patches):
            tensor[slot] = 0.0
        fill_slot(self.counted, slot, -1 if sequence.wants(*DECODED) else NEVER)
        if not sequence.wants(*SIGNALS):
            return
        spans = sequence.prompt.layout.spans.numpy()  # numpy's small operations take a tenth of torch's time
        table = np.zeros((len(spans), self.spans.shape[2]), np.float32)
        columns = (spans >= 0).nonzero()[0]
        table[columns, spans[columns]] = 1.0
        diagnose, layout = sequence.spec.diagnose, sequence.prompt.layout
        by_content = diagnose is not None and diagnose.spans == "content"
        table[:, [BEFORE, AFTER]] = layout.texts if by_content else layout.halves
        self.spans[slot, : len(spans)] = to_device(torch.from_numpy(table), self.spans)
        self.tokens[slot] = self.spans[slot].sum(0)

    def prefill(self, chunk: PrefillChunk) -> PrefillCapture | None:
        is_wanted = any(sequence.wants(*SIGNALS) for sequence in chunk.sequences)
        if chunk.replay or not is_wanted:
            return None
        by_patch, mapped = (
            any(sequence.wants(signal) for sequence in chunk.sequences) for signal in (Signal.PATCHES, Signal.MAP)
        )
        return self.capture(chunk, by_patch, mapped, chunk.width <= capture_rows(self.spans.device))

    def capture(self, chunk: PrefillChunk, by_patch: bool, mapped: bool, at_once: bool) -> PrefillCapture | None:
        """Return the capture of the rows that a chunk's sequences need, None where there are none.

        by_patch, mapped: whether any sequence needs these. at_once: capture all rows, because choosing those of a short
        chunk takes longer.
        """
        sequences, device = chunk.sequences, self.spans.device
        groups = torch.zeros(len(sequences), 3, chunk.width)
        for row, spans in enumerate(zip(sequences, chunk.starts, chunk.lengths, strict=True)):
            for group, part in enumerate(_captured_rows(*spans)):
                groups[row, group, part] = 1.0
        captured = groups.any(1)
        most = int(captured.sum(1).max())
        if not most and not chunk.complete:
            return None
        if at_once:
            rows = torch.arange(chunk.width).expand(len(sequences), -1).contiguous()
        else:
            rows = captured.int().argsort(dim=1, descending=True, stable=True)[:, :most]
            groups = groups.gather(2, rows[:, None].expand(-1, 3, -1))
        return PrefillCapture(
            self.spans[chunk.rows],
            to_device(rows, device),
            to_device(groups, device),
            to_device(chunk.last, device) if chunk.complete else None,
            by_patch=by_patch,
            maps_from=self.sums.shape[1] - self.pool.mllm.focus_layers if mapped else None,
            at_once=at_once,
            ranks=self.pool.mllm.ranks,
        )

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, PrefillCapture):
            return
        if hook.last_sums is not None and any(sequence.wants(Signal.STEPS) for sequence in chunk.sequences):
            computed.numbers.update(step_numbers(hook.last_sums.transpose(0, 1), self.tokens[chunk.rows]))
        for row, sequence in enumerate(chunk.sequences):
            if not sequence.wants(*SIGNALS):
                continue
            sums = hook.sums[:, row]
            captured = sequence.captured.get(NAME)
            if captured is None:
                captured = sequence.captured[NAME] = PromptAttention(sums)
            else:
                captured.sums = captured.sums + sums
            if hook.last_sums is not None:
                captured.last_sums = hook.last_sums[:, row]
            columns = chunk.columns  # some passes read more columns, all of them masked
            if hook.patches is not None:
                self.patches[sequence.slot, :, :columns] += hook.patches[:, row, :columns]
            if hook.last_patches is not None:
                captured.last_patches = hook.last_patches[:, row, :columns]
            if hook.maps is not None:
                captured.map = hook.maps[row, :columns]

    def reuse(self, sequence: Sequence) -> Reuse:
        if not sequence.wants(*SIGNALS):
            return Reuse(sequence.prompt.length)
        rows = torch.cat(_captured_rows(sequence, 0, sequence.prompt.length))
        return Reuse(int(rows.min()) if len(rows) else sequence.prompt.length)

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(sequence.wants(*DECODED) or sequence.due for sequence in sequences)

    def decode(self, batch: DecodeBatch) -> DecodeCapture:
        return DecodeCapture(self.spans[batch.rows], self.pool.mllm.ranks)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, DecodeCapture):
            return
        if hook.counts is None:
            add_attention(hook.means, self.spans[batch.rows], batch.positions, self.counts(batch))
        if any(sequence.wants(Signal.STEPS) for sequence in batch.sequences):
            sums = hook.means @ self.spans[batch.rows, : hook.means.shape[2]]
            computed.numbers.update(step_numbers(sums, self.tokens[batch.rows]))
        for sequence in batch.sequences:
            if sequence.due:
                sequence.captured[NAME].map = hook.means[sequence.slot, -self.pool.mllm.focus_layers :].mean(0)

    def counts(self, batch: DecodeBatch) -> AttentionCounts:
        """Return the tensors in which a decode of these rows is counted."""
        rows = batch.rows
        tensors = (self.counted, self.sums, self.decay, self.patches)
        return AttentionCounts(self.sources[rows], batch.active, *[tensor[rows] for tensor in tensors])

    def take(self, sequence: Sequence) -> Attention | None:
        captured: PromptAttention | None = sequence.captured.get(NAME)
        if sequence.spec.diagnose is None or captured is None or captured.last_sums is None:
            return None
        layout, slot, output = sequence.prompt.layout, sequence.slot, sequence.fed
        question, modality, anchor = captured.sums.unbind(1)
        rows = RowCounts.of(len(layout.question_rows), output)
        modality_rows = RowCounts.of(len(layout.modality_rows), output)
        patches = self.patches[slot]
        if rows.last and captured.last_patches is not None:
            patches = captured.last_patches
        last, generated = captured.last_sums, self.sums[slot]
        shares = source_shares(last, self.sources[slot])[None]
        first = sequence.prompt.length
        return Attention(
            (last if rows.last else question + generated).cpu(),
            rows,
            (last if modality_rows.last else modality + generated).cpu(),
            modality_rows,
            torch.cat([shares, self.decay[slot, first : first + output]]).cpu(),
            anchor.cpu(),
            patches[:, to_device(layout.image_columns, patches.device)].cpu(),
        )


def _captured_rows(sequence: Sequence, start: int, length: int) -> list[torch.Tensor]:
    """Return the query rows, counted in the chunk, of the groups `QUESTIONS`, `MODALITY` and `ANCHORS`."""
    layout = sequence.prompt.layout
    groups = [torch.zeros(0, dtype=torch.int64)] * 3
    if sequence.wants(Signal.SPANS, Signal.PATCHES):
        groups[QUESTIONS] = layout.question_rows - start
    if sequence.wants(Signal.SPANS):
        groups[MODALITY] = layout.modality_rows - start
    if sequence.wants(Signal.ANCHOR) and layout.images:
        groups[ANCHORS] = layout.images[-1].columns - start
    return [rows[(rows >= 0) & (rows < length)] for rows in groups]
