"""A toy readout: how long the residual stream is where an answer's last token was generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, Scalar
from steering.protocol.signals import Signal


class Norm(Readout):
    """|h| after each layer, at the row that generated the last token; the last layer's is kept by journal and metrics."""

    name = "norm"
    scalars: ClassVar[Mapping[str, type]] = {"last_norm": float}

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.STREAM})

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        _, last = answer.taken["residual"].states  # (layers, d) each: the mean over rows, and the last row
        return {"by_layer": last.norm(dim=-1).tolist()}

    def summary(self, report: Any) -> Mapping[str, Scalar]:
        return {"last_norm": report["by_layer"][-1]}
