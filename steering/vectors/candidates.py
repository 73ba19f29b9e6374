"""Candidates: vectors that were built under a name that stands for another one until somebody says so."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steering.errors import VectorError
from steering.vectors.vector import SteeringVector

CANDIDATES = "candidates"
"""The folder of candidates within a folder of vectors, which no store looks into."""
PREVIOUS = "previous"
"""The folder of vectors that a candidate has replaced."""


def candidate_file(folder: Path, name: str) -> Path:
    """Return the file of a name's candidate in a folder of vectors."""
    return folder / CANDIDATES / f"{name}.safetensors"


def use(folder: Path, name: str) -> Path | None:
    """Let a name stand for its candidate; return the file that keeps the folder's own earlier vector, if it had one.

    A running server takes the candidate at its next lookup. Raises VectorError where there is none, or a damaged one.
    """
    source, target = candidate_file(folder, name), folder / f"{name}.safetensors"
    load_candidate(folder, name)
    backup: Path | None = None
    if target.exists():
        backup = folder / PREVIOUS / f"{name}-{_digest_of(target)}.safetensors"
        backup.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(target, backup)  # a copy, so that the name stands for a vector at any moment
    source.replace(target)
    return backup


def undoing(target: Path, backup: Path | None) -> str:
    """Return how to undo a use, in words; `backup` is what `use` returned."""
    if backup is None:
        return f"to undo that, remove {target}"
    return f"to undo that, run 'helmsight vectors import {backup} --name {target.stem} --replace'"


def load_candidate(folder: Path, name: str) -> SteeringVector:
    """Return the candidate of a name; raise VectorError where there is none, or a damaged one."""
    path = candidate_file(folder, name)
    if not path.is_file():
        raise VectorError(f"There is no candidate {name!r}: {path} does not exist.", code="unknown_vector")
    return SteeringVector.load(path)


def side_by_side(current: SteeringVector | None, candidate: SteeringVector) -> list[tuple[str, str, str]]:
    """Return rows of a property, its value for the vector in use, and that for the candidate; "-" stands for none."""
    names = list(_described(candidate))
    before = dict.fromkeys(names, "-") if current is None else _described(current)
    other = _described(candidate)
    rows = [(name, before[name], other[name]) for name in names]
    if current is not None and current.direction.shape == candidate.direction.shape:
        for layer in sorted({*current.layers, *candidate.layers}):
            cosine = torch.cosine_similarity(current.direction[layer], candidate.direction[layer], dim=0)
            rows.append((f"cosine at layer {layer}", "1", f"{float(cosine) * _sign(current, candidate):.3f}"))
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _described(vector: SteeringVector) -> dict[str, str]:
    calibration: Mapping[str, Any] = vector.info.get("calibration") or {}
    plain = calibration.get("baseline", {}).get("plain")
    chosen = calibration.get("chosen", {})
    strengths = vector.calibrated_range
    return {
        "digest": vector.identity[:16],
        "layers": ", ".join(map(str, vector.layers)),
        "strength 1, in published units": "-" if vector.published is None else f"{vector.published:g}",
        "strength 1, mean size by layer": ", ".join(
            f"{float(vector.delta(1.0)[layer].abs().mean()):.4g}" for layer in vector.layers
        ),
        "calibrated range": "not calibrated" if strengths is None else f"{strengths[0]:g} to {strengths[1]:g}",
        "Vision Ratio, plain": _ratio(plain),
        "Vision Ratio, toward vision": _ratio(chosen.get("vision")),
        "Vision Ratio, toward text": _ratio(chosen.get("text")),
        "samples": f"{vector.info.get('samples', '-')} and {calibration.get('samples', 0)} for the calibration",
        "reliable": _reliable(vector),
    }


def _reliable(vector: SteeringVector) -> str:
    """Return whether its direction is reliable, in words; the probe's warnings do not change that, but are counted."""
    if (reliable := vector.info.get("reliable")) is None:
        return "-"
    warnings = len(vector.info.get("warnings", ()))
    return ("yes" if reliable else "no") + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")


def _ratio(shares: Mapping[str, Any] | None) -> str:
    ratio = None if shares is None else shares.get("vision_ratio")
    if shares is None or ratio is None:
        return "-"
    bounds = shares.get("vision_ratio_95")
    return f"{ratio:.3f}" if bounds is None else "{:.3f} ({:.3f} to {:.3f})".format(ratio, *bounds)


def _sign(current: SteeringVector, candidate: SteeringVector) -> float:
    """Return -1 where the two name opposite modalities as positive."""
    return 1.0 if current.positive == candidate.positive else -1.0


def _digest_of(path: Path) -> str:
    try:
        return SteeringVector.load(path).identity[:16]
    except VectorError:
        return "damaged"
