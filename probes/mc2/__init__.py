"""The benchmark of modality preference (MC2): conditions, ablations, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for `server.cli`, until it names the new place
    from probes.conflicts.samples import ConflictSample as Sample

__all__ = ["Sample"]
