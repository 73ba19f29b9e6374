"""Times of filters as people write them: Unix seconds, dates, or an age such as 1d."""

from __future__ import annotations

import re
import time
from datetime import datetime

FORMS = "Unix seconds, a date such as 2026-11-21 or 2026-11-21T10:00, or an age such as 90m, 12h, 1d or 2w"
"""The accepted forms; a date without an offset is in the local time zone, on a server in the server's."""
LATEST = 1e11  # the year 5138

_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def unix_time(text: str, now: float | None = None) -> float:
    """Return the Unix time that a text names, an age counted back from now; raises ValueError for anything else."""
    if age := _AGE.fullmatch(text):
        return max(0.0, (time.time() if now is None else now) - float(age[1]) * _SECONDS[age[2]])
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            seconds = -1.0
    if not 0 <= seconds <= LATEST:
        raise ValueError(f"must be {FORMS}; got {text[:64]!r}")
    return seconds
