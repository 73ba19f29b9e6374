"""Measures of the residual stream (`stream.cpp`)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cosine_similarity

from steering.loops.operators import operator


@operator(lambda mha, ffn: mha.new_empty(mha.shape[:-1], dtype=torch.float32))
def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """D in nats, (...), of the updates of a layer, (..., d): KL(softmax(mha) || softmax(ffn)) (SAGE paper, section 5.1)."""
    p, q = mha.float().log_softmax(-1), ffn.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measures_of(
    before: torch.Tensor, out: torch.Tensor, mha: torch.Tensor, ffn: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """(rows, n, readouts) of h_in, h_out and the updates (rows, n, d) between them, gates (rows, n, width); the readouts in
    the order of `recorders.residual.NAMES`, the gates' NaN where there are none."""
    before, out, mha, ffn = (value.float() for value in (before, out, mha, ffn))
    middle = before + mha
    mha_norm, ffn_norm = mha.norm(dim=-1), ffn.norm(dim=-1)
    gates = torch.full_like(mha_norm, math.nan) if gate is None else (gate > 0).float().mean(-1)
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


@operator(lambda streams, gates: streams[0].new_empty(streams[0].shape[0], len(streams) // 4, 9, dtype=torch.float32))
def stream_measures(streams: list[torch.Tensor], gates: list[torch.Tensor]) -> torch.Tensor:
    """(rows, layers, readouts): `measures_of` one token a row. streams: of each layer h_in, h_out and the updates, (rows, 1,
    d), all in one list. gates: of each layer, or none."""
    layers = [tuple(streams[first : first + 4]) for first in range(0, len(streams), 4)]
    own: list[torch.Tensor | None] = [*gates] or [None] * len(layers)
    return torch.stack([measures_of(*one, gate)[:, 0] for one, gate in zip(layers, own, strict=True)], 1)  # type: ignore[call-arg]
