"""How far two answers are apart inside the model: semantic drift (SPD-Faith Bench paper, section 4.3)."""

from __future__ import annotations

from typing import Any

import torch

from steering.protocol.readout import DRIFT_ROWS, Diagnose, FinishedAnswer, Readout
from steering.protocol.signals import Signal
from steering.recorders.residual import NAME, Residual


def drift(one: torch.Tensor, other: torch.Tensor, rows: str = DRIFT_ROWS[0]) -> list[float]:
    """Cosine similarity by layer of two answers' states, (2, layers, d) each, in the order of `DRIFT_ROWS`."""
    index = DRIFT_ROWS.index(rows)
    return torch.nn.functional.cosine_similarity(one[index].float(), other[index].float(), dim=-1).tolist()


class DriftReadout(Readout):
    """How far an answer is from the one that it is compared with: an earlier one, or its baseline."""

    name = "drift"

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.STREAM})

    def read(self, answer: FinishedAnswer) -> dict[str, Any] | None:
        taken: Residual = answer.taken[NAME]
        rows, earlier = answer.options.drift_rows, answer.options.earlier
        if earlier is not None:
            name, other = earlier.name, earlier.states
        elif answer.baseline is not None:
            name, other = "baseline", answer.baseline[NAME].states
        else:
            return None
        return {"to": name, "rows": rows, "cosine": drift(taken.states, other, rows)}
