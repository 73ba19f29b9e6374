"""The times of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Times of an answer in seconds of the monotonic clock: queued, admitted to a slot, first token, last token."""

    queued: float
    admitted: float
    first: float
    last: float
