"""Counting of a decode's measurements in the slots' tensors (`counts.cpp`).

In all functions: positions (rows,), the columns that a decode writes. active: (rows, 1, 1), 0 for rows whose result is
discarded. counted: (rows,) int64, as in `recorders.counting`.
"""

from __future__ import annotations

import torch

from steering.cpu.kernels.operators import operator
from steering.interventions.see import measured_of
from steering.interventions.think import ThinkCounts, add_damping
from steering.recorders.attention import AttentionCounts, add_attention


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
    """Count the attention of a decode; return it for all layers, (rows, layers, columns).

    means: of each layer (rows, columns), float32 and contiguous. spans: (rows, length, spans), 1 where a column belongs to a
    span. sources: (rows, spans, 3). Counted are: in sums (rows, layers, spans) attention by span, in decay (rows, length,
    layers, 3), where the row writes, its `source_shares`, in patches (rows, layers, length) attention by column.
    """
    stacked = torch.stack(means, 1)
    add_attention(stacked, spans, positions, AttentionCounts(sources, active, counted, sums, decay, patches))
    return stacked


@operator(lambda *_: None, changes=("counted", "sums"))
def count_damping(
    damped: list[torch.Tensor],
    positions: torch.Tensor,
    active: torch.Tensor,
    counted: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Count in sums (rows, layers, 2) how many updates were damped, and D.

    damped: of each layer (rows, 1, 3), as `stream.damping` returns it.
    """
    add_damping(torch.cat(damped, 1)[..., 1:], positions, ThinkCounts(active, counted, sums))


@operator(lambda *_: None, changes=("steps",))
def note_enhancement(effects: list[torch.Tensor], positions: torch.Tensor, steps: torch.Tensor) -> None:
    """Write the effect of See to steps (rows, length, 4), where each row writes.

    The four are alpha's mean and greatest over layers, and the mass on images before and after, means over layers. effects:
    of each layer (rows, 3), as `looks.enhanced` returns them.
    """
    rows = torch.arange(len(positions), device=positions.device)
    steps[rows, positions] = measured_of(*torch.stack(effects, 1).unbind(-1))  # of (rows, layers) each
