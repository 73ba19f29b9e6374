"""What a decode measured, counted in what slots hold (`counts.cpp`).

All: positions (rows,), the columns that a decode writes. active: (rows, 1, 1), 0 for rows whose step is for nothing.
counted: (rows,) int64, the last column of each that was counted, `NEVER` where none is to be: a step may run again, and is
counted once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from steering.accel.cpu.kernels.operators import operator

NEVER = torch.iinfo(torch.int64).max
"""Stands for the last column of a slot of which nothing is counted."""


class AttentionCounts(NamedTuple):
    """What a decode's attention is counted in, as `count_attention` takes it."""

    sources: torch.Tensor
    active: torch.Tensor
    counted: torch.Tensor
    sums: torch.Tensor
    decay: torch.Tensor
    patches: torch.Tensor


def newly(positions: torch.Tensor, active: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """(rows,) bool, whether a row is to be counted, which from now on it is."""
    new = (positions > counted) & (active[:, 0, 0] > 0)
    counted.copy_(torch.where(new, positions, counted))
    return new


def source_shares(sums: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """(..., layers, 3): shares of vision, system and user text, normalised over the three; NaN where a layer's window holds
    none. sums: (..., layers, spans). sources: (..., spans, 3). Attention by span and step (SPD-Faith Bench paper, section
    4.2)."""
    parts = (sums[..., None] * sources[..., None, :, :]).sum(-2)  # of so few, a product takes longer than its terms
    return parts / parts.sum(-1, keepdim=True)


@operator(
    lambda means, *_: means[0].new_empty(means[0].shape[0], len(means), means[0].shape[1]),
    changes=("counted", "sums", "decay", "patches"),
)
def count_attention(
    means: list[torch.Tensor],
    spans: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
    active: torch.Tensor,
    counted: torch.Tensor,
    sums: torch.Tensor,
    decay: torch.Tensor,
    patches: torch.Tensor,
) -> torch.Tensor:
    """What was read of all layers, (rows, layers, columns).

    means: of each layer (rows, columns), float32 and contiguous. spans: (rows, length, spans), 1 where a column belongs to a
    span. sources: (rows, spans, 3). What is counted: in sums (rows, layers, spans) what was read by span, in decay (rows,
    length, layers, 3), where the row writes, its `source_shares`, in patches (rows, layers, length) what was read by column.
    """
    stacked = torch.stack(means, 1)
    add_attention(stacked, spans, positions, AttentionCounts(sources, active, counted, sums, decay, patches))
    return stacked


def add_attention(means: torch.Tensor, spans: torch.Tensor, positions: torch.Tensor, counts: AttentionCounts) -> None:
    """Count what was read of all layers, (rows, layers, columns), as `count_attention` does."""
    rows, columns = torch.arange(len(positions), device=positions.device), means.shape[2]
    new = newly(positions, counts.active, counts.counted)[:, None, None]
    by_span = means @ spans[:, :columns]
    counts.sums.add_(torch.where(new, by_span, 0.0))
    shares = source_shares(by_span, counts.sources)
    counts.decay[rows, positions] = torch.where(new, shares, counts.decay[rows, positions])
    counts.patches[:, :, :columns].add_(torch.where(new, means, 0.0))


@operator(lambda *_: None, changes=("counted", "sums"))
def count_damping(
    told: list[torch.Tensor],
    positions: torch.Tensor,
    active: torch.Tensor,
    counted: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Count in sums (rows, layers, 2) how many updates were damped, and D. told: of each layer (rows, 1, 3), what
    `stream.damping` says."""
    new = newly(positions, active, counted)[:, None, None]
    sums.add_(torch.where(new, torch.cat(told, 1)[..., 1:], 0.0))


@operator(lambda *_: None, changes=("steps",))
def note_enhancement(told: list[torch.Tensor], positions: torch.Tensor, steps: torch.Tensor) -> None:
    """Write to steps (rows, length, 4), where each row writes, alpha, its mean and greatest over layers, and the mass on
    images before and after, means over layers. told: of each layer (rows, 3), what `looks.enhanced` says."""
    alpha, seen, after = torch.stack(told, 1).unbind(-1)  # (rows, layers)
    rows = torch.arange(len(positions), device=positions.device)
    steps[rows, positions] = torch.stack([alpha.mean(1), alpha.amax(1), seen.mean(1), after.mean(1)], -1)
