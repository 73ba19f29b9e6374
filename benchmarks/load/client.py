"""A load of requests, and the record of what each client saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TIMEOUT = 600.0
"""Seconds without a byte of an answer, after which it counts as none."""


@dataclass(frozen=True)
class Server:
    """url: up to /v1. fields: what each of its requests has besides, taken in turn."""

    name: str
    url: str
    model: str
    fields: Sequence[Mapping[str, Any]] = ({},)


@dataclass
class Seen:
    """One request.

    status: of HTTP, 0 where there was none, and `fault` says why. first: seconds to the first text; gaps: between its
    pieces, of a stream; total: to the end. left: the client went before that.
    """

    status: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    left: bool = False
    fault: str = ""


@dataclass(frozen=True)
class Load:
    """Requests as JSON, how many clients ask them, and the share of streams that is left after the first text.

    rate: how many come a second, in place of clients: each when it comes (a Poisson process), whatever became of those
    before it. again: seconds after which who was refused (429) asks the same again, instead of the next one.
    """

    bodies: Sequence[Mapping[str, Any]]
    clients: int
    leaving: float = 0.0
    rate: float | None = None
    again: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a load, and how many seconds it took."""

    seen: Sequence[Seen]
    seconds: float

    @property
    def whole(self) -> list[Seen]:
        """The requests that were answered to the end."""
        return [one for one in self.seen if one.status == 200 and not one.left]

    @property
    def tokens_per_second(self) -> float:
        return sum(one.tokens for one in self.whole) / self.seconds

    def statuses(self) -> dict[str, int]:
        """How many requests ended how: their status, or that the client left."""
        found = ["left" if one.left else str(one.status) for one in self.seen]
        return {name: found.count(name) for name in sorted(set(found))}

    def faults(self) -> Counter[str]:
        """Why how many requests had no answer."""
        return Counter(one.fault for one in self.seen if one.status == 0)

    def times(self, name: str, percent: float) -> float | None:
        """A percentile in milliseconds of `first`, `total` or `gaps`; None where there are none."""
        values = [value for one in self.whole for value in _listed(getattr(one, name))]
        return float(np.percentile(values, percent)) * 1000 if values else None


def _listed(value: Any) -> Iterable[float]:
    return () if value is None else value if isinstance(value, list) else (value,)
