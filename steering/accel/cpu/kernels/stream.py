"""Measures of the residual stream (`stream.cpp`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import cosine_similarity, pad

from steering.accel.cpu.kernels.counts import newly
from steering.accel.cpu.kernels.operators import operator


def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """D in nats, (...), of the updates of a layer, (..., d): KL(softmax(mha) || softmax(ffn)) (SAGE paper, section 5.1)."""
    p, q = mha.float().log_softmax(-1), ffn.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def share_above(gates: torch.Tensor) -> torch.Tensor:
    """(rows, n): the share of gates (rows, n, width) that is above 0; NaN without any."""
    return (gates > 0).float().mean(-1)


def measures_of(
    before: torch.Tensor, out: torch.Tensor, mha: torch.Tensor, ffn: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """(rows, n, readouts) of h_in, h_out and the updates (rows, n, d) between them, and the share of gates (rows, n) that
    is above 0; the readouts in the order of `recorders.residual.NAMES`."""
    before, out, mha, ffn = (value.float() for value in (before, out, mha, ffn))
    middle = before + mha
    mha_norm, ffn_norm = mha.norm(dim=-1), ffn.norm(dim=-1)
    return torch.stack(
        [
            cosine_similarity(before, middle, dim=-1),
            cosine_similarity(middle, out, dim=-1),
            mha_norm / before.norm(dim=-1),
            ffn_norm / middle.norm(dim=-1),
            mha_norm,
            ffn_norm,
            (mha + ffn).norm(dim=-1),
            divergence(mha, ffn),
            gates,
        ],
        -1,
    )


@operator(lambda mha, *_: mha.new_empty(*mha.shape[:2], 3, dtype=torch.float32))
def damping(
    mha: torch.Tensor, ffn: torch.Tensor, gamma: torch.Tensor, threshold: torch.Tensor, layer: int, every: int
) -> torch.Tensor:
    """By how much of itself the FFN's update of each token is to be more (SAGE paper, equation 5), gamma - 1 where D is
    above the threshold, whether it is, and D: (rows, n, 3). D is 0 in rows with an infinite threshold, unless `every` is 1.

    mha, ffn: (rows, n, d), the updates, contiguous. gamma: (rows,). threshold: (rows, layers).
    """
    above, differs = threshold[:, layer, None], divergence(mha, ffn)
    if not every:
        differs = torch.where(above < torch.inf, differs, 0.0)
    over = differs > above
    return torch.stack([(gamma[:, None] - 1) * over, over.float(), differs], -1)


def _looks(
    streams: list[torch.Tensor], states: list[torch.Tensor], gates: object, activations: list[torch.Tensor], *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, layers = states[0].shape[0], len(states)
    widest = max(one.shape[2] for one in activations)
    return tuple(
        states[0].new_empty(rows, layers, size, dtype=torch.float32) for size in (9, states[0].shape[2], widest)
    )  # type: ignore[return-value]


@operator(_looks)
def stream_looks(
    streams: list[torch.Tensor], states: list[torch.Tensor], gates: list[torch.Tensor], activations: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one token a row: `measures_of` (rows, layers, readouts), states (rows, layers, d), and activations (rows, layers,
    width), 0 behind a layer's last one.

    streams: of each layer h_in, h_out and the updates, (rows, 1, d), all in one list. states: of each layer (rows, 1, d).
    gates, activations: of each layer (rows, 1, its width), which is 0 where there are none.
    """
    before, out, mha, ffn = (torch.cat(streams[first::4], 1) for first in range(4))  # a GPU waits for each operation
    return measures_of(before, out, mha, ffn, _shares(gates)), torch.cat(states, 1).float(), _side_by_side(activations)


def _side_by_side(layers: list[torch.Tensor]) -> torch.Tensor:
    """(rows, layers, width), float32, 0 behind a layer's last one, of layers (rows, 1, each its width)."""
    widest = max(one.shape[2] for one in layers)
    return torch.cat(
        [one if one.shape[2] == widest else pad(one, (0, widest - one.shape[2])) for one in layers], 1
    ).float()


def _shares(gates: list[torch.Tensor]) -> torch.Tensor:
    """(rows, layers): `share_above` of each layer's gates (rows, 1, its width)."""
    alike = len({one.shape[2] for one in gates}) == 1
    return share_above(torch.cat(gates, 1)) if alike else torch.cat([share_above(one) for one in gates], 1)


class StreamCounts(NamedTuple):
    """What a decode's residual stream is counted in, as `count_stream` takes it."""

    decoded: torch.Tensor
    active: torch.Tensor
    counted: torch.Tensor
    sums: torch.Tensor
    neurons: torch.Tensor
    totals: torch.Tensor


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
    """Count what `stream_looks` says: in sums (rows, layers, readouts) what was measured, in the rows that are `decoded`
    (rows, 1), in neurons (rows, layers, width) the activations, and in totals (rows, 2, layers, d) the states: their sum,
    and the latest. positions, active, counted: as those of `kernels.counts`."""
    found = stream_looks(streams, states, gates, activations)
    add_stream(*found, positions, StreamCounts(decoded, active, counted, sums, neurons, totals))


def add_stream(
    measured: torch.Tensor,
    states: torch.Tensor,
    activations: torch.Tensor,
    positions: torch.Tensor,
    counts: StreamCounts,
) -> None:
    """Count what `stream_looks` said, as `count_stream` does."""
    new = newly(positions, counts.active, counts.counted)[:, None, None]
    counts.sums.add_(torch.where(new & (counts.decoded[..., None] > 0), measured, 0.0))
    counts.neurons[..., : activations.shape[2]].add_(torch.where(new, activations, 0.0))
    total, latest = counts.totals.unbind(1)
    total.add_(torch.where(new, states, 0.0))
    latest.copy_(torch.where(new, states, latest))
