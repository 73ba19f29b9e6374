"""Durations and points in time as words of a command line: 1h, 90d, 2027-01-31."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from typer import BadParameter

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def duration(text: str) -> timedelta:
    """Parse a duration such as 30m, 1h, 7d or 0; raises BadParameter."""
    parsed = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if parsed is None and text != "0":
        raise BadParameter(f"{text!r} is not a duration; write a number and a unit, such as 30m, 1h or 7d")
    return timedelta() if parsed is None else timedelta(**{UNITS[parsed[2]]: int(parsed[1])})


def expiry(text: str) -> datetime | None:
    """Parse a future time, as a duration from now or a local date or time; None for "never". Raises BadParameter."""
    now = datetime.now(UTC).replace(microsecond=0)
    if text == "never":
        return None
    try:
        expires = now + duration(text)
    except BadParameter:
        try:
            expires = datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError, OSError):
            raise BadParameter(f"{text!r} is not a time; write 90d, 2027-01-31, or never") from None
    except OverflowError:
        raise BadParameter(f"{text!r} is too far away") from None
    if expires <= now:
        raise BadParameter(f"{text!r} is in the past")
    return expires
