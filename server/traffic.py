"""The sources of requests: live traffic, benchmarks and the like, which metrics and journal count apart."""

from __future__ import annotations

from collections.abc import Mapping

HEADER = "X-Helmsight-Source"
LIVE = "live"
SOURCES = (LIVE, "eval", "probe", "batch", "observe")
"""The known sources: few, because they are labels of metrics."""


def source_of(headers: Mapping[str, str]) -> str:
    """Return the source that a request's headers name, live by default; raises ValueError for an unknown one."""
    source = headers.get(HEADER, LIVE)
    if source not in SOURCES:
        raise ValueError(f"The header {HEADER} must be one of {', '.join(SOURCES)}; got {source[:64]!r}.")
    return source
