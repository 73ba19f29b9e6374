"""The versioned envelope of readouts beside an answer; None (null) where a value does not exist."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from steering.prompt.layout import ImageSpan
from steering.prompt.tiles import Tiling
from steering.protocol.readout import REGISTRY, FinishedAnswer, Readout, Scalar
from steering.recorders.attention import RowCounts

log = logging.getLogger(__name__)

VERSION = 2
"""The envelope's version, raised when a key changes its meaning."""


def envelope(answer: FinishedAnswer) -> dict[str, Any]:
    """Return the diagnostics of a finished answer."""
    rows = RowCounts.of(len(answer.layout.question_rows), answer.fed)
    return {
        "version": VERSION,
        "images": [
            _image(*numbered) for numbered in enumerate(zip(answer.images, answer.tilings, strict=True), start=1)
        ],
        "rows": rows._asdict(),
        **{
            readout.name: answer.report_of(readout.name)
            for readout in answer.options.readouts
            if readout.part_of is None
        },
    }


def _image(number: int, shown: tuple[ImageSpan, Tiling | None]) -> dict[str, Any]:
    image, tiling = shown
    grid = image.grid if tiling is None else tiling.grid
    small = {"overview": list(tiling.overview_grid)} if tiling is not None and len(tiling.overview) else {}
    return {"image": number, "tokens": image.tokens, "grid": list(grid) if grid else None, **small}


def summary(diagnostics: Mapping[str, Any] | None) -> dict[str, Scalar]:
    """Return every scalar that readouts keep of an envelope; None where it holds none."""
    out: dict[str, Scalar] = {}
    for name, readout in REGISTRY.items():
        report = None if diagnostics is None else diagnostics.get(name)
        scalars = {} if report is None else _summary(readout, report)
        out |= {scalar: scalars.get(scalar) for scalar in readout.scalars}
    return out


def _summary(readout: Readout, report: Any) -> Mapping[str, Scalar]:
    """Return the scalars that a readout keeps of its result, none where it raises: the answer is valid all the same."""
    try:
        return readout.summary(report)
    except Exception:
        log.exception("The readout %r could not summarise its result.", readout.name)
        return {}
