"""The numbers of an answer that are kept and counted, taken from its reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from server.journal.bounded import number
from steering.protocol.readout import Scalar
from steering.readouts.envelope import summary

Report = Mapping[str, Any] | None


def scalars(applied: Report, diagnostics: Report) -> dict[str, Scalar]:
    """Return a choice's numbers by the names that readouts declare, and its `dose`, the mean over steering vectors.

    Missing and non-finite numbers are None, since one such number would spoil every mean.
    """
    numbers: dict[str, Scalar] = {**summary(diagnostics), "dose": _dose(applied or {})}
    return {
        name: value if isinstance(value, bool) or number(value) is not None else None for name, value in numbers.items()
    }


def _dose(applied: Mapping[str, Any]) -> float | None:
    doses = [steer["dose"] for steer in applied.get("steering", ()) if steer["dose"] is not None]
    return statistics.fmean(doses) if doses else None
