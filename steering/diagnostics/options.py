"""Which readouts a request asks for."""

from __future__ import annotations

from dataclasses import dataclass

from steering.errors import RequestError

READOUTS = ("focus", "modality", "decay")
"""Readouts this engine computes, in the order of the envelope."""


@dataclass(frozen=True)
class Diagnose:
    """Options of the diagnostics envelope. `target_image` (counted from 1) adds the correctness of the focused image."""

    include: frozenset[str] = frozenset(READOUTS)
    target_image: int | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(self.include - set(READOUTS)):
            raise RequestError(
                f"'diagnostics.include' does not know {', '.join(unknown)}; allowed: {', '.join(READOUTS)}.",
                param="diagnostics.include",
            )
        if self.target_image is not None and self.target_image < 1:
            raise RequestError(
                f"'diagnostics.target_image' counts from 1; got {self.target_image}.", param="diagnostics.target_image"
            )
