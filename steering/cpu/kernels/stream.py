"""Measurements of the residual stream (`stream.cpp`)."""

from __future__ import annotations

import torch

from steering.cpu.kernels.operators import operator
from steering.interventions import think
from steering.recorders import residual
from steering.recorders.residual import StreamCounts, add_stream

damping = operator(lambda mha, *_: mha.new_empty(*mha.shape[:2], 3, dtype=torch.float32))(think.damping)


def _looks(
    streams: list[torch.Tensor], states: list[torch.Tensor], gates: object, activations: list[torch.Tensor], *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, layers = states[0].shape[0], len(states)
    widest = max(tensor.shape[2] for tensor in activations)
    return tuple(
        states[0].new_empty(rows, layers, size, dtype=torch.float32) for size in (9, states[0].shape[2], widest)
    )  # type: ignore[return-value]


stream_looks = operator(_looks)(residual.stream_looks)


@operator(lambda *_: None, changes=("counted", "sums", "neurons", "totals"))
def count_stream(
    streams: list[torch.Tensor],
    states: list[torch.Tensor],
    gates: list[torch.Tensor],
    activations: list[torch.Tensor],
    positions: torch.Tensor,
    decoded: torch.Tensor,
    active: torch.Tensor,
    counted: torch.Tensor,
    sums: torch.Tensor,
    neurons: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """Count what `stream_looks` returns, as `residual.add_stream`. decoded and the rest: as in `StreamCounts`."""
    looks = residual.stream_looks(streams, states, gates, activations)
    add_stream(*looks, positions, StreamCounts(decoded, active, counted, sums, neurons, totals))
