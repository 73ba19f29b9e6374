"""What a slot's attention sums up to, in the prompt and while it answers."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from steering.attention import ANCHORS, MODALITY, QUESTIONS, PrefillCapture
from steering.sequence import Sequence
from steering.spans import CONTEXT, FIRST_IMAGE, SYSTEM

BEFORE, AFTER = -2, -1
"""Where the sums over spans hold those over the whole prompt's system and user part: behind those of the images."""


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


class ReadoutSlots:
    """Sums of every slot, over the rows of its generated tokens; what is not asked for is not computed.

    spans: (slots, length, spans), 1 where a column belongs to a span, `BEFORE` and `AFTER` included. sums: (slots, layers,
    spans). decay: (slots, length, layers, 3), shares at each column. content: (slots, 1), which shares. patches: (slots,
    layers, length), attention by column, the question's rows included.
    """

    def __init__(self, slots: int, length: int, layers: int, images: int, device: torch.device):
        spans = FIRST_IMAGE + images - BEFORE
        self.spans = torch.zeros(slots, length, spans, device=device)
        self.sums = torch.zeros(slots, layers, spans, device=device)
        self.decay = torch.zeros(slots, length, layers, 3, device=device)
        self.content = torch.zeros(slots, 1, dtype=torch.bool, device=device)
        self.patches = torch.zeros(slots, layers, length, device=device)

    def place(self, slot: int, sequence: Sequence) -> None:
        """A new sequence in a slot."""
        for tensor in (self.spans, self.sums, self.patches):
            tensor[slot] = 0.0
        if not sequence.wants_shares:
            return
        layout, spans = sequence.prompt.layout, sequence.prompt.layout.spans
        table = torch.zeros(len(spans), self.spans.shape[2])
        columns = (spans >= 0).nonzero()[:, 0]
        table[columns, spans[columns]] = 1.0
        table[:, [BEFORE, AFTER]] = layout.halves.float()
        self.spans[slot, : len(spans)] = table.to(self.spans.device)
        self.content[slot] = sequence.diagnose is not None and sequence.diagnose.spans == "content"

    def move(self, source: int, target: int) -> None:
        """Copy a slot's sums to another slot."""
        for tensor in (self.spans, self.sums, self.decay, self.content, self.patches):
            tensor[target] = tensor[source]

    def record(
        self, means: torch.Tensor, positions: torch.Tensor, active: torch.Tensor | float, decay: bool, patches: bool
    ) -> None:
        """Add a decode of the first rows. means: (layers, rows, columns), attention, mean over heads. positions: (rows,).
        active: (rows, 1, 1), 0 for rows whose step is for nothing."""
        rows, columns = means.shape[1:]
        by_row = means.transpose(0, 1)
        sums = by_row @ self.spans[:rows, :columns]
        self.sums[:rows] += sums * active
        if decay:
            shares = span_shares(sums, self.content[:rows])
            self.decay[torch.arange(rows, device=positions.device), positions] = shares
        if patches:
            self.patches[:rows, :, :columns] += by_row * active

    def capture(
        self, sequences: Rows[Sequence], start: int, lengths: Rows[int], complete: bool, focus_layers: int
    ) -> PrefillCapture | None:
        """What is to be captured of a chunk of prompts that begins at `start`: rows of the question and of the last image,
        and each prompt's last row where the chunk is `complete`; None where nobody wants any."""
        if not any(sequence.wants_shares for sequence in sequences):
            return None
        groups = [_captured_rows(s, start, lengths[row]) for row, s in enumerate(sequences)]
        wanted = [torch.cat(parts).unique() for parts in groups]
        most = max(len(rows) for rows in wanted)
        if most == 0 and not complete:
            return None
        rows = torch.zeros(len(sequences), most, dtype=torch.int64)
        weights = torch.zeros(len(sequences), most, len(groups[0]))
        for row, (parts, own) in enumerate(zip(groups, wanted, strict=True)):
            rows[row, : len(own)] = own
            for group, part in enumerate(parts):
                weights[row, : len(own), group] = torch.isin(own, part).float()
        device, layers, columns = self.spans.device, self.sums.shape[1], start + max(lengths)
        spans = self.spans[torch.tensor([sequence.slot for sequence in sequences], device=device)]
        shape = (layers, len(sequences), columns)
        capture = PrefillCapture(
            spans,
            rows.to(device),
            weights.to(device),
            torch.zeros(layers, len(sequences), weights.shape[2], spans.shape[2], device=device),
        )
        by_patch = any(sequence.diagnose is not None and sequence.diagnose.wants_patches for sequence in sequences)
        if by_patch:
            capture.patches = torch.zeros(shape, device=device)
        if complete:
            capture.last = torch.tensor(lengths, device=device) - 1
            capture.last_sums = torch.zeros(layers, len(sequences), spans.shape[2], device=device)
            if by_patch:
                capture.last_patches = torch.zeros(shape, device=device)
            if any(sequence.generate is not None for sequence in sequences):
                capture.maps, capture.maps_from = torch.zeros(shape[1:], device=device), layers - focus_layers
        return capture

    def keep(self, sequence: Sequence, capture: PrefillCapture, row: int) -> None:
        """Add what a chunk captured of one row to its sequence and its slot."""
        captured = sequence.captured
        sums = capture.sums[:, row]
        captured.sums = sums if captured.sums is None else captured.sums + sums
        if capture.last_sums is not None:
            captured.last_sums = capture.last_sums[:, row]
        if capture.patches is not None:
            self.patches[sequence.slot, :, : capture.patches.shape[2]] += capture.patches[:, row]
        if capture.last_patches is not None:
            captured.last_patches = capture.last_patches[:, row]


def _captured_rows(sequence: Sequence, start: int, length: int) -> list[torch.Tensor]:
    """Query rows, counted in the chunk, of the groups `QUESTIONS`, `MODALITY` and `ANCHORS`."""
    layout, include = sequence.prompt.layout, sequence.diagnose.include if sequence.diagnose else frozenset()
    wanted = [torch.zeros(0, dtype=torch.int64)] * 3
    if sequence.diagnose is not None:
        wanted[QUESTIONS] = layout.question_rows - start
        wanted[MODALITY] = layout.modality_rows - start
    if "anchor" in include and layout.images:
        wanted[ANCHORS] = layout.images[-1].columns - start
    return [rows[(rows >= 0) & (rows < length)] for rows in wanted]
