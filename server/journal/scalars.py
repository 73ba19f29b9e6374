"""The numbers of an answer that are kept and counted, out of its reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any] | None


def scalars(applied: Report, diagnostics: Report) -> dict[str, Any]:
    """The scalar diagnostics of a choice, None where its reports lack them; names as in `schema.DIAGNOSTICS`.

    `dose` is the mean over steering vectors, `kl` the mean over layers.
    """
    focus, modality, decay, residual, flags = (
        _section(diagnostics, name) for name in ("focus", "modality", "decay", "residual", "flags")
    )
    steers = _section(applied, "steering", list)
    return {
        "attention_ratio": number(modality.get("attention_ratio")),
        "focused_image": whole(focus.get("image")),
        "focus_share": number(focus.get("share")),
        "target_image": whole(focus.get("target_image")),
        "correct": truth(focus.get("correct")),
        "decay_slope": number(decay.get("slope")),
        "kl": mean(residual.get("kl")),
        "perceptual_blindness": truth(flags.get("perceptual_blindness")),
        "dissociation": truth(flags.get("dissociation")),
        "dose": mean([steer.get("dose") for steer in steers if isinstance(steer, Mapping)]),
    }


def number(value: Any) -> float | None:
    """A finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """An integer that a database can hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else None


def truth(value: Any) -> bool | None:
    """A bool."""
    return value if isinstance(value, bool) else None


def mean(values: Any) -> float | None:
    """The mean of the finite numbers in a list, None where there are none."""
    found = [x for x in map(number, values) if x is not None] if isinstance(values, (list, tuple)) else []
    return sum(found) / len(found) if found else None


def _section(report: Report, name: str, kind: type = Mapping) -> Any:
    found = report.get(name) if isinstance(report, Mapping) else None
    return found if isinstance(found, kind) else kind() if kind is list else {}
