"""A second toy readout, which reads nothing: its summary is a number and a flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from steering import Diagnose
from steering.protocol.readout import FinishedAnswer, Readout, Scalar
from steering.protocol.signals import Signal


class Odd(Readout):
    """A readout with a value that a test sets."""

    name = "norm"
    scalars: ClassVar[Mapping[str, type]] = {"norm": float, "odd": bool}

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset()

    def read(self, answer: FinishedAnswer) -> Any:
        raise NotImplementedError

    def summary(self, report: Any) -> Mapping[str, Scalar]:
        return {"norm": report["value"], "odd": report["odd"]}
