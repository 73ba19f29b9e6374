"""The old name of `probes.sage.samples`, for the types that `server.cli` names; goes when it names the new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.sage.samples import Difference, Existence

__all__ = ["Difference", "Existence"]
