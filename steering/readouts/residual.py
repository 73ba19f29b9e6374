"""The readout of what attention and FFN do to the residual stream; `recorders.residual` has the numbers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from steering.measures import known, mean
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, ReadoutOption, Scalar
from steering.protocol.signals import Signal
from steering.recorders.residual import NAME, NAMES, Residual

RESIDUAL_ROWS = ("answer", "prompt", "generated")
"""The rows that are read.

They are the rows that generate the answer's tokens, that is the prompt's last one and those of all generated tokens that are
fed; all of the prompt's, as in the authors' `analysis/analyze_layer_changes.py`; or those of generated tokens alone.
"""
ROWS = ReadoutOption.word("residual_rows", RESIDUAL_ROWS, "The rows that the residual readout averages.")


class ResidualReadout(Readout):
    """Means over the requested rows, by layer, and the share of active neurons."""

    name = NAME
    options = (ROWS,)
    scalars: ClassVar[dict[str, type]] = {"kl": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "kl": Quantity(
            "Divergence of the updates of attention and FFN, mean over layers",
            unit="nats", low=0.0, buckets=(0.01, 0.03, 0.1, 0.3, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.UPDATES})

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        taken: Residual = answer.taken[NAME]
        kind = answer.options[ROWS]
        rows = {"answer": answer.fed + 1, "prompt": len(answer.layout.spans), "generated": answer.fed}[kind]
        return residual(taken.sums, rows, taken.neurons if answer.fed else taken.neurons * math.nan, kind)

    def summary(self, said: Any) -> dict[str, Scalar]:
        return {"kl": mean(said["kl"])}


def residual(sums: torch.Tensor, rows: int, neurons: torch.Tensor, kind: str) -> dict[str, Any]:
    """Return the `residual` readout: means over `rows` rows of a kind, by layer.

    sums: (layers, readouts). neurons: (layers,).
    """
    means = dict(zip(NAMES, (sums / rows if rows else sums * math.nan).T, strict=True))
    return {
        "rows": {"kind": kind, "count": rows},
        **{name: known(values) for name, values in {**means, "neuron_ratio": neurons}.items()},
    }
