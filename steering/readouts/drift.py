"""Semantic drift: the distance of two answers inside the model (SPD-Faith Bench paper, section 4.3)."""

from __future__ import annotations

from typing import Any

import torch

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, ReadoutOption
from steering.protocol.signals import Signal
from steering.recorders.residual import NAME, Residual

DRIFT_ROWS = ("mean", "last")
"""The states that represent an answer.

They are the mean of the residual stream over the rows that generated its tokens, as in the authors'
`analysis/eval_cosine.py`, or the row that generated its last token.
"""
ROWS = ReadoutOption.word(
    "drift_rows",
    DRIFT_ROWS,
    "The states that represent an answer in the drift: the mean over its rows, or the last one.",
)


def drift(first: torch.Tensor, other: torch.Tensor, rows: str = DRIFT_ROWS[0]) -> list[float]:
    """Return the cosine similarity by layer of two answers' states, (2, layers, d) each, in the order of `DRIFT_ROWS`."""
    index = DRIFT_ROWS.index(rows)
    return torch.nn.functional.cosine_similarity(first[index].float(), other[index].float(), dim=-1).tolist()


class DriftReadout(Readout):
    """Similarity of an answer to the one that it is compared with: an earlier one, or its baseline."""

    name = "drift"
    options = (ROWS,)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.STREAM})

    def read(self, answer: FinishedAnswer) -> dict[str, Any] | None:
        residual: Residual = answer.taken[NAME]
        rows, earlier = answer.options[ROWS], answer.options.earlier
        if earlier is not None:
            name, other = earlier.name, earlier.states
        elif answer.baseline is not None:
            name, other = "baseline", answer.baseline[NAME].states
        else:
            return None
        return {"to": name, "rows": rows, "cosine": drift(residual.states, other, rows)}
