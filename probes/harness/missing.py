"""Samples that cannot be asked because a picture or a field is missing: they are logged and left out while they are few."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from probes.harness.pictures import Source, picture

S = TypeVar("S")

MAX_MISSING = 0.1
"""The share of the samples that may be left out; with more, the rest is no longer the benchmark."""
NAMED = 10
"""The most samples that a message names."""
LONGEST = 300
"""The most characters of each reason in a message."""

log = logging.getLogger(__name__)


class Incomplete(ValueError):
    """A sample lacks a part that its question needs."""


def few(missing: int, of: int) -> bool:
    """Return whether so many may be left out: at most a share of `MAX_MISSING`, always one, and never half."""
    return missing <= max(1, MAX_MISSING * of) and 2 * missing < max(of, 1)


def leave_out(why: Sequence[str], of: int, left_out: list[str] | None = None) -> None:
    """Log why samples are left out, and add the reasons to `left_out`; raise ValueError if they are too many."""
    if not why:
        return
    short = (reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}..." for reason in why[:NAMED])
    reasons = "; ".join(short) + "; ..." * (len(why) > NAMED)
    if not few(len(why), of):
        raise ValueError(
            f"{len(why)} of {of} samples cannot be asked (at most {MAX_MISSING:.0%} may be missing): {reasons}"
        )
    log.warning("%d of %d samples are left out: %s", len(why), of, reasons)
    if left_out is not None:
        left_out.extend(why)


def left_out(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the report's entry on samples that were left out, if there are any."""
    count = about.get("left_out")
    return {"Left out": f"{count}, because their files are missing or do not decode"} if count else {}


def check_there(data: Iterable[str]) -> None:
    """Raise ValueError for a file or folder of --data that does not exist."""
    for path in data:
        if not Path(path).exists():
            raise ValueError(f"--data: there is no {path}")


def decodable(
    samples: Iterable[S], count: int, sources: Callable[[S], Sequence[Source]], left_out: list[str] | None = None
) -> list[S]:
    """Return the first `count` samples, or fewer, whose pictures decode.

    The others are left out. Raises ValueError if they are too many of those examined.
    """

    def decode(sample: S) -> None:
        for source in sources(sample):
            picture(source, str(getattr(sample, "id", None) or "a sample"))

    decoded, broken = decoding(samples, count, decode)
    leave_out(broken, len(decoded) + len(broken), left_out)
    return decoded


def decoding(samples: Iterable[S], count: int, decode: Callable[[S], object]) -> tuple[list[S], list[str]]:
    """Return the first `count` samples for which `decode` raises no ValueError, and the messages of failures."""
    decoded: list[S] = []
    broken: list[str] = []
    for sample in samples:
        if len(decoded) == count:
            break
        try:
            decode(sample)
        except ValueError as error:
            broken.append(str(error))
        else:
            decoded.append(sample)
    return decoded, broken
