"""A third toy intervention, which does nothing: what it is asked for is private, and what it reports is long."""

from __future__ import annotations

from typing import Any

from steering import Options


class Whisper(Options):
    """A nudge whose text is counted and whose steps are numbered in the journal, not kept."""

    path = ("toys", "nudge")
    by: float = 1.0
    whisper: str = "nothing"

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.whisper,)

    def brief(self, report: Any) -> Any:
        return report | {"steps": len(report["steps"])}
