"""What a slot's attention sums up to while it answers."""

from __future__ import annotations

import torch

from steering.spans import CONTEXT, FIRST_IMAGE, SYSTEM


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
