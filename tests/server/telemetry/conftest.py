"""The journal's applications, of which telemetry reads, too."""

from __future__ import annotations

from tests.server.journal.conftest import serve

__all__ = ["serve"]
