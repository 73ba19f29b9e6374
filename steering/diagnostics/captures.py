"""What a slot's attention sums up to, in the prompt and while it answers."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from steering.attention import ANCHORS, LAST, QUESTIONS, PrefillCapture
from steering.sequence import Sequence
from steering.spans import CONTEXT, FIRST_IMAGE, QUESTION, SYSTEM


def span_shares(sums: torch.Tensor) -> torch.Tensor:
    """(..., 3): shares of vision, system and user text, normalised over the three; NaN where a layer's window holds none.

    sums: (..., spans). Attention by span and step (SAGE paper, section 4.2).
    """
    vision = sums[..., FIRST_IMAGE:].sum(-1)
    user = sums[..., CONTEXT:FIRST_IMAGE].sum(-1)
    parts = torch.stack([vision, sums[..., SYSTEM], user], dim=-1)
    return parts / parts.sum(-1, keepdim=True)


class ReadoutSlots:
    """Sums of every slot, over the rows of its generated tokens; what is not asked for is not computed.

    spans: (slots, length, spans), 1 where a column belongs to a span. sums: (slots, layers, spans). decay: (slots, length,
    layers, 3), shares at each column. patches: (slots, layers, length), attention by column, the question's rows included.
    residual: (slots, layers, readouts).
    """

    def __init__(self, slots: int, length: int, layers: int, spans: int, residuals: int, device: torch.device):
        self.spans = torch.zeros(slots, length, spans, device=device)
        self.sums = torch.zeros(slots, layers, spans, device=device)
        self.decay = torch.zeros(slots, length, layers, 3, device=device)
        self.patches = torch.zeros(slots, layers, length, device=device)
        self.residual = torch.zeros(slots, layers, residuals, device=device)

    def place(self, slot: int, spans: torch.Tensor | None) -> None:
        """A new sequence in a slot; spans: (n,), its prompt's span numbers where attention is to be summed."""
        for tensor in (self.spans, self.sums, self.patches, self.residual):
            tensor[slot] = 0.0
        if spans is not None:
            columns = (spans >= 0).nonzero()[:, 0]
            self.spans[slot, columns.to(self.spans.device), spans[columns].to(self.spans.device)] = 1.0

    def move(self, source: int, target: int) -> None:
        """Copy a slot's sums to another slot."""
        for tensor in (self.spans, self.sums, self.decay, self.patches, self.residual):
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
            self.decay[torch.arange(rows, device=positions.device), positions] = span_shares(sums)
        if patches:
            self.patches[:rows, :, :columns] += by_row * active

    def capture(
        self, sequences: Rows[Sequence], start: int, lengths: Rows[int], complete: bool, focus_layers: int
    ) -> PrefillCapture | None:
        """What is to be captured of a chunk of prompts that begins at `start`: the question's rows, each prompt's last row
        where it is `complete`, its last image's rows; None where nobody wants any."""
        if not any(sequence.wants_shares for sequence in sequences):
            return None
        groups = [_captured_rows(s, start, lengths[row], complete) for row, s in enumerate(sequences)]
        most = max(sum(len(rows) for rows in wanted) for wanted in groups)
        if most == 0:
            return None
        rows = torch.zeros(len(sequences), most, dtype=torch.int64)
        weights = torch.zeros(len(sequences), most, len(groups[0]))
        for row, wanted in enumerate(groups):
            filled = 0
            for group, part in enumerate(wanted):
                rows[row, filled : filled + len(part)] = part
                weights[row, filled : filled + len(part), group] = 1.0
                filled += len(part)
        device, layers, columns = self.spans.device, self.sums.shape[1], start + max(lengths)
        spans = self.spans[torch.tensor([sequence.slot for sequence in sequences], device=device)]
        sums = torch.zeros(layers, len(sequences), weights.shape[2], spans.shape[2], device=device)
        maps = patches = None
        if any(sequence.generate is not None for sequence in sequences):
            maps = torch.zeros(len(sequences), columns, device=device)
        if any(sequence.diagnose is not None and sequence.diagnose.wants_patches for sequence in sequences):
            patches = torch.zeros(layers, len(sequences), columns, device=device)
        return PrefillCapture(spans, rows.to(device), weights.to(device), sums, maps, layers - focus_layers, patches)

    def keep(self, sequence: Sequence, capture: PrefillCapture, row: int) -> None:
        """Add what a chunk captured of one row to its sequence and its slot."""
        question, last, anchor = (capture.sums[:, row, group] for group in (QUESTIONS, LAST, ANCHORS))
        if sequence.question_sums is not None and sequence.last_sums is not None and sequence.anchor_sums is not None:
            question, last = sequence.question_sums + question, sequence.last_sums + last
            anchor = sequence.anchor_sums + anchor
        sequence.question_sums, sequence.last_sums, sequence.anchor_sums = question, last, anchor
        if capture.patches is not None:
            self.patches[sequence.slot, :, : capture.patches.shape[2]] += capture.patches[:, row]


def _captured_rows(sequence: Sequence, start: int, length: int, complete: bool) -> list[torch.Tensor]:
    """Query rows, counted in the chunk, of the groups `QUESTIONS`, `LAST` and `ANCHORS`."""
    layout, include = sequence.prompt.layout, sequence.diagnose.include if sequence.diagnose else frozenset()
    wanted = [torch.zeros(0, dtype=torch.int64)] * 3
    if sequence.diagnose is not None:
        wanted[QUESTIONS] = layout.columns(QUESTION) - start
    if complete:
        wanted[LAST] = torch.tensor([length - 1])
    if "anchor" in include and layout.images:
        wanted[ANCHORS] = layout.images[-1].columns - start
    return [rows[(rows >= 0) & (rows < length)] for rows in wanted]
