"""The sources of requests: live traffic, benchmarks and the like, which metrics and journal count apart."""

from __future__ import annotations

HEADER = "X-Helmsight-Source"
LIVE = "live"
SOURCES = (LIVE, "eval", "probe", "batch", "observe")
"""The known sources: few, because they are labels of metrics."""


def source_of(named: str | None) -> str:
    """Return the source that a request's header names, live without one; raises ValueError for an unknown one."""
    source = LIVE if named is None else named
    if source not in SOURCES:
        raise ValueError(f"The header {HEADER} must be one of {', '.join(SOURCES)}; got {source[:64]!r}.")
    return source
