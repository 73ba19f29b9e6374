"""Digests of the steering vectors and the calibration of a model, which tell rows that were answered under others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.batches.file import answered_in


@dataclass(frozen=True)
class Digests:
    """The digests of a server's vectors by name, and of its model's calibration (None: unknown)."""

    vectors: Mapping[str, str] = field(default_factory=dict)
    calibration: str | None = None

    def difference(self, row: Mapping[str, Any]) -> str | None:
        """Return which vector or calibration of an answered row is another one now, None if all are the same."""
        for name, digest in _vectors(row):
            if (now := self.vectors.get(name)) is not None and now != digest:
                return f"the vector {name!r} had the digest {digest[:16]}, and has {now[:16]} now"
        for digest in _calibrations(row):
            if self.calibration is not None and digest != self.calibration:
                return f"the model's calibration had the digest {digest[:16]}, and has {self.calibration[:16]} now"
        return None


def _choices(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    body = answered_in(row).body
    choices = body.get("choices") if isinstance(body, Mapping) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping):
            yield choice


def _vectors(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each vector that `applied` reports."""
    for choice in _choices(row):
        for report in _objects(choice.get("applied")):
            name, digest = report.get("vector", report.get("name")), report.get("digest")
            if isinstance(name, str) and isinstance(digest, str):
                yield name.partition("@")[0], digest


def _calibrations(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the digest of each calibration that interventions or readouts report."""
    for choice in _choices(row):
        for report in _objects({name: choice.get(name) for name in ("applied", "diagnostics")}):
            digest = report.get("calibration")
            if isinstance(digest, Mapping):
                digest = digest.get("digest")
            if isinstance(digest, str):
                yield digest


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object within a value."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _objects(inner)
