"""What a slot's attention sums up to, in the prompt and while it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from steering.decoder.hooks import Hook, Observer, Weights
from steering.decoder.ranks import Ranks
from steering.devices import fill, sent
from steering.prompt.spans import CONTEXT, FIRST_IMAGE, SYSTEM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots

NAME = "attention"
QUESTIONS, MODALITY, ANCHORS = range(3)
"""Groups of captured prefill rows: the question's that see every image, those of them that see the text context too, the
last image's."""
CAPTURE_ROWS = 128
"""Prefill rows whose attention weights exist at once while they are reduced."""
BEFORE, AFTER = -2, -1
"""Where the sums over spans hold those over the whole prompt's system and user part: behind those of the images."""
SIGNALS = frozenset({Signal.SPANS, Signal.LAST, Signal.ANCHOR, Signal.DECAY, Signal.PATCHES, Signal.MAP})
DECODED = (Signal.SPANS, Signal.DECAY, Signal.PATCHES)
"""Those that generated tokens add to."""


def image_sums(sums: torch.Tensor) -> torch.Tensor:
    """(..., images): the part of sums (..., spans) that is the images'."""
    return sums[..., FIRST_IMAGE:BEFORE]


def span_shares(sums: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """(..., 3): shares of vision, system and user text, normalised over the three; NaN where a layer's window holds none.

    sums: (..., spans). content: bool, whether system and user text are what messages say, and not all of the prompt before
    the first image and behind it. Attention by span and step (SPD-Faith Bench paper, section 4.2).
    """
    system = torch.where(content, sums[..., SYSTEM], sums[..., BEFORE])
    user = torch.where(content, sums[..., CONTEXT:FIRST_IMAGE].sum(-1), sums[..., AFTER])
    parts = torch.stack([image_sums(sums).sum(-1), system, user], dim=-1)
    return parts / parts.sum(-1, keepdim=True)


class RowCounts(NamedTuple):
    """How many query rows of each kind an average of attention was taken over: the question's, those of generated tokens,
    and the prompt's last one, which stands in where there are no others."""

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
    """What a sequence's prompt left behind. sums: (layers, groups, spans) of its rows. last_sums: (layers, spans) and
    last_patches: (layers, columns), of its last row. map: (columns,), of the row before the latest mask, mean over the focus
    layers."""

    sums: torch.Tensor
    last_sums: torch.Tensor | None = None
    last_patches: torch.Tensor | None = None
    map: torch.Tensor | None = None


@dataclass
class PrefillCapture(Observer):
    """Attention of chosen query rows, reduced on the device to sums over spans of columns, mean over heads.

    spans: (rows, columns, S), 1 where a column belongs to a span. rows: (rows, R), query indices in the chunk. weights:
    (rows, R, 3), 1 on those of each group. sums: (layers, rows, 3, S), to which each layer adds. patches: where wanted
    (layers, rows, columns), to which each layer adds the weights of the rows of `QUESTIONS`.

    last: (rows,), each prompt's last row, where the chunk holds it, which is reduced apart: See and Generate rest on it, and
    must not depend on what else is read. last_sums: (layers, rows, S). maps: where wanted (rows, columns), to which the
    layers from `maps_from` on add its weights. last_patches: where wanted (layers, rows, columns).
    """

    spans: torch.Tensor
    rows: torch.Tensor
    row_groups: torch.Tensor
    sums: torch.Tensor
    patches: torch.Tensor | None = None
    last: torch.Tensor | None = None
    last_sums: torch.Tensor | None = None
    maps: torch.Tensor | None = None
    maps_from: int = 0
    last_patches: torch.Tensor | None = None

    def prefill(self, layer: int, weights: Weights, columns: int) -> None:
        spans = self.spans[:, :columns]
        for first in range(0, self.rows.shape[1], CAPTURE_ROWS):
            own = weights(self.rows[:, first : first + CAPTURE_ROWS]).mean(1).to(spans.device)  # (rows, R, columns)
            groups = self.row_groups[:, first : first + CAPTURE_ROWS].transpose(1, 2)  # (rows, 3, R)
            self.sums[layer] += groups @ (own @ spans)
            if self.patches is not None:
                self.patches[layer, :, :columns] += (groups[:, QUESTIONS, None] @ own)[:, 0]
        if self.last is None or self.last_sums is None:
            return
        own = weights(self.last[:, None]).mean(1).to(spans.device)  # (rows, 1, columns)
        self.last_sums[layer] = (own @ spans)[:, 0]
        if self.maps is not None and layer >= self.maps_from:
            self.maps[:, :columns] += own[:, 0]
        if self.last_patches is not None:
            self.last_patches[layer, :, :columns] = own[:, 0]

    def share(self, ranks: Ranks) -> None:
        """Make what was captured of this rank's heads that of all heads."""
        self.sums = ranks.mean(self.sums)
        for name in ("patches", "last_sums", "maps", "last_patches"):
            if (own := getattr(self, name)) is not None:
                setattr(self, name, ranks.mean(own))


class DecodeCapture(Observer):
    """Attention of the one query of each row, mean over heads, layer by layer."""

    def __init__(self, device: torch.device):
        self._device = device
        self._by_layer: list[torch.Tensor] = []

    def decode(self, layer: int, weights: torch.Tensor) -> None:
        self._by_layer.append(weights.mean(1).to(self._device))

    def means(self) -> torch.Tensor:
        """(layers, rows, columns)."""
        return torch.stack(self._by_layer)


class AttentionRecorder(Slots):
    """Attention by span, by step and by column; what is not asked for is not computed.

    spans: (slots, length, spans), 1 where a column belongs to a span, `BEFORE` and `AFTER` included. sums: (slots, layers,
    spans), over the rows of generated tokens. decay: (slots, length, layers, 3), shares at each column. content: (slots, 1),
    which shares. patches: (slots, layers, length), attention by column, the question's rows included.
    """

    measured: ClassVar[tuple[str, ...]] = ("patches",)
    signals: ClassVar[frozenset[Signal]] = SIGNALS
    compiled: ClassVar[bool] = True

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, length, layers, device = pool.slots, pool.length, pool.layers, pool.device
        spans = FIRST_IMAGE + pool.max_images - BEFORE
        self.spans = torch.zeros(slots, length, spans, device=device)
        self.sums = torch.zeros(slots, layers, spans, device=device)
        self.decay = torch.zeros(slots, length, layers, 3, device=device)
        self.content = torch.zeros(slots, 1, dtype=torch.bool, device=device)
        self.patches = torch.zeros(slots, layers, length, device=device)

    def place(self, sequence: Sequence) -> None:
        slot = sequence.slot
        for tensor in (self.spans, self.sums, self.patches):
            tensor[slot] = 0.0
        if not sequence.wants(*SIGNALS):
            return
        layout, spans = sequence.prompt.layout, sequence.prompt.layout.spans
        table = torch.zeros(len(spans), self.spans.shape[2])
        columns = (spans >= 0).nonzero()[:, 0]
        table[columns, spans[columns]] = 1.0
        table[:, [BEFORE, AFTER]] = layout.halves.float()
        self.spans[slot, : len(spans)] = sent(table, self.spans)
        diagnose = sequence.spec.diagnose
        fill(self.content, slot, diagnose is not None and diagnose.spans == "content")

    def prefill(self, chunk: PrefillChunk) -> PrefillCapture | None:
        if chunk.replay or not any(sequence.wants(*SIGNALS) for sequence in chunk.sequences):
            return None
        sequences, device = chunk.sequences, self.spans.device
        groups = [_captured_rows(*row) for row in zip(sequences, chunk.starts, chunk.lengths, strict=True)]
        wanted = [torch.cat(parts).unique() for parts in groups]
        most = max(len(rows) for rows in wanted)
        if most == 0 and not chunk.complete:
            return None
        rows = torch.zeros(len(sequences), most, dtype=torch.int64)
        row_groups = torch.zeros(len(sequences), most, len(groups[0]))
        for row, (parts, own) in enumerate(zip(groups, wanted, strict=True)):
            rows[row, : len(own)] = own
            for group, part in enumerate(parts):
                row_groups[row, : len(own), group] = torch.isin(own, part).float()
        spans = self.spans[chunk.rows]
        layers = self.pool.layers
        shape = (layers, len(sequences), chunk.columns)
        capture = PrefillCapture(
            spans,
            sent(rows, device),
            sent(row_groups, device),
            torch.zeros(layers, len(sequences), row_groups.shape[2], spans.shape[2], device=device),
        )
        by_patch = any(sequence.wants(Signal.PATCHES) for sequence in sequences)
        if by_patch:
            capture.patches = torch.zeros(shape, device=device)
        if chunk.complete:
            capture.last = sent(chunk.last, device)
            capture.last_sums = torch.zeros(layers, len(sequences), spans.shape[2], device=device)
            if by_patch:
                capture.last_patches = torch.zeros(shape, device=device)
            if any(sequence.wants(Signal.MAP) for sequence in sequences):
                capture.maps = torch.zeros(shape[1:], device=device)
                capture.maps_from = layers - self.pool.mllm.focus_layers
        return capture

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, PrefillCapture):
            return
        hook.share(self.pool.mllm.ranks)
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
            if hook.patches is not None:
                self.patches[sequence.slot, :, : hook.patches.shape[2]] += hook.patches[:, row]
            if hook.last_patches is not None:
                captured.last_patches = hook.last_patches[:, row]
            if hook.maps is not None:
                captured.map = hook.maps[row]

    def reuse(self, sequence: Sequence) -> Reuse:
        if not sequence.wants(*SIGNALS):
            return Reuse(sequence.prompt.length)
        rows = torch.cat(_captured_rows(sequence, 0, sequence.prompt.length))
        return Reuse(int(rows.min()) if len(rows) else sequence.prompt.length)

    def decode(self, batch: DecodeBatch) -> DecodeCapture | None:
        if not any(one.wants(*DECODED) or one.due for one in batch.sequences):
            return None
        return DecodeCapture(self.spans.device)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, DecodeCapture):
            return
        means = self.pool.mllm.ranks.mean(hook.means())
        sequences, by_row = batch.sequences, means.transpose(0, 1)  # (rows, layers, columns)
        rows, columns = len(sequences), batch.columns
        sums = by_row @ self.spans[:rows, :columns]
        self.sums[:rows] += sums * batch.active
        if any(sequence.wants(Signal.DECAY) for sequence in sequences):
            shares = span_shares(sums, self.content[:rows])
            self.decay[torch.arange(rows, device=sums.device), batch.positions] = shares
        if any(sequence.wants(Signal.PATCHES) for sequence in sequences):
            self.patches[:rows, :, :columns] += by_row * batch.active
        for sequence in sequences:
            if sequence.due:
                sequence.captured[NAME].map = by_row[sequence.slot, -self.pool.mllm.focus_layers :].mean(0)

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
        shares = span_shares(last, self.content[slot])[None]
        first = sequence.prompt.length
        return Attention(
            (last if rows.last else question + generated).cpu(),
            rows,
            (last if modality_rows.last else modality + generated).cpu(),
            modality_rows,
            torch.cat([shares, self.decay[slot, first : first + output]]).cpu(),
            anchor.cpu(),
            patches[:, sent(layout.image_columns, patches.device)].cpu(),
        )


def _captured_rows(sequence: Sequence, start: int, length: int) -> list[torch.Tensor]:
    """Query rows, counted in the chunk, of the groups `QUESTIONS`, `MODALITY` and `ANCHORS`."""
    layout = sequence.prompt.layout
    wanted = [torch.zeros(0, dtype=torch.int64)] * 3
    if sequence.wants(Signal.SPANS, Signal.PATCHES):
        wanted[QUESTIONS] = layout.question_rows - start
    if sequence.wants(Signal.SPANS):
        wanted[MODALITY] = layout.modality_rows - start
    if sequence.wants(Signal.ANCHOR) and layout.images:
        wanted[ANCHORS] = layout.images[-1].columns - start
    return [rows[(rows >= 0) & (rows < length)] for rows in wanted]
