"""A load of requests, and the record of what each client saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TIMEOUT = 600.0
"""Seconds without a byte after which a request counts as unanswered."""


@dataclass(frozen=True)
class Server:
    """A server under load.

    url: up to /v1. fields: extra fields of its requests, taken in turn. protocol: one of `protocols.PROTOCOLS`.
    """

    name: str
    url: str
    model: str
    fields: Sequence[Mapping[str, Any]] = ({},)
    protocol: str = "chat"


@dataclass
class Seen:
    """The record of a single request.

    status: of HTTP, 0 where there was none, and `fault` is the reason. first: seconds to the first text; gaps: between the
    pieces of a stream; total: to the end. left: the client disconnected before that.
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
    """Requests as JSON, the number of clients, and the share of streams that are left after the first text.

    rate: requests a second, in place of clients: each is sent at its time (a Poisson process), whatever the state of the
    earlier ones. again: seconds after which a refused client (429) sends the same request again, instead of the next one.
    """

    bodies: Sequence[Mapping[str, Any]]
    clients: int
    leaving: float = 0.0
    rate: float | None = None
    again: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The records of a load, and the seconds it took."""

    seen: Sequence[Seen]
    seconds: float

    @property
    def whole(self) -> list[Seen]:
        """The requests that were answered to the end."""
        return [request for request in self.seen if request.status == 200 and not request.left]

    @property
    def tokens_per_second(self) -> float:
        return sum(request.tokens for request in self.whole) / self.seconds

    def statuses(self) -> dict[str, int]:
        """Return the number of requests by their status, or by the client's leaving."""
        statuses = ["left" if request.left else str(request.status) for request in self.seen]
        return {name: statuses.count(name) for name in sorted(set(statuses))}

    def faults(self) -> Counter[str]:
        """Return the number of requests without an answer, by reason."""
        return Counter(request.fault for request in self.seen if request.status == 0)

    def times(self, name: str, percent: float) -> float | None:
        """Return a percentile in milliseconds of `first`, `total` or `gaps`; None where there are none."""
        values = [value for request in self.whole for value in _list_of(getattr(request, name))]
        return float(np.percentile(values, percent)) * 1000 if values else None


def _list_of(value: Any) -> Iterable[float]:
    return () if value is None else value if isinstance(value, list) else (value,)
