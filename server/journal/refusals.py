"""Counts of refused requests, which leave no row, by minute, status, error code and route.

Nothing of the requests themselves is kept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from server.journal.reading.queries import Filters
from server.journal.schema import REFUSALS

MINUTE = 60
KINDS = 4096
"""Largest number of kinds that wait to be written; further kinds are not counted."""
LABEL = 64
EVERY = 1.0
"""Least seconds between two writes, so that a flood of refusals does not delay rows."""
MOST = 1000

Kind = tuple[int, int, str, str]
"""Minute, status, code and route."""

of = REFUSALS.c


class Refusals:
    """Counts that wait to be written; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()
        self._writing: Counter[Kind] = Counter()
        self._next = 0.0

    def add(self, status: int, code: str, route: str) -> bool:
        """Count a refusal now and return whether there was room."""
        kind = (int(time.time() // MINUTE), status, code[:LABEL], route[:LABEL])
        with self._lock:
            if len(self._counts) >= KINDS and kind not in self._counts:
                return False
            self._counts[kind] += 1
            return True

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def due(self) -> bool:
        """True if counts are pending and the last write is long enough ago."""
        return bool(self) and time.monotonic() >= self._next

    def write(self, connection: Connection) -> None:
        """Add the pending counts to the table; call `written` once that is committed."""
        with self._lock:
            self._writing = Counter(self._counts)
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        values = [dict(zip(of.keys(), (*kind, n), strict=True)) for kind, n in sorted(self._writing.items())]
        rows = dialect.insert(REFUSALS)
        both = rows.on_conflict_do_update(
            index_elements=list(REFUSALS.primary_key), set_={"count": of["count"] + rows.excluded["count"]}
        )
        connection.execute(both, values)

    def written(self) -> None:
        """Discard the written counts."""
        with self._lock:
            self._counts -= self._writing
            self._next = time.monotonic() + EVERY


def prune(connection: Connection, most: int, before: float) -> None:
    """Delete counts from before a Unix time, and the oldest minutes beyond `most` counts."""
    connection.execute(delete(REFUSALS).where(of.minute < int(before // MINUTE)))
    newest = select(of.minute).order_by(of.minute.desc()).offset(most).limit(1)
    if (minute := connection.execute(newest).scalar()) is not None:
        connection.execute(delete(REFUSALS).where(of.minute <= minute))


def refusals(connection: Connection, filters: Filters, size: int) -> dict[str, Any]:
    """Return the refused requests in the filters' time, by kind and by period of `size` seconds.

    Other filters concern rows, which refusals do not have.
    """
    terms = []
    if filters.since is not None:
        terms.append(of.minute >= int(filters.since // MINUTE))
    if filters.until is not None:
        terms.append(of.minute < filters.until / MINUTE)
    total = func.sum(of["count"])
    kinds = select(of.status, of.code, of.route, total.label("n")).where(*terms).group_by(of.status, of.code, of.route)
    by_code = [
        {"status": record.status, "code": record.code, "route": record.route, "count": int(record.n)}
        for record in connection.execute(kinds.order_by(total.desc(), of.status, of.code, of.route).limit(MOST))
    ]
    period = of.minute // (size // MINUTE)
    counted = select(period, of.status, total).where(*terms).group_by(period, of.status)
    periods: dict[int, dict[str, int]] = defaultdict(dict)
    for at, status, count in connection.execute(counted.order_by(period.desc(), of.status)):
        if at not in periods and len(periods) == MOST:
            break
        periods[at][str(status)] = int(count)
    rows = [
        {"start": at * size, "count": sum(statuses.values()), "statuses": statuses}
        for at, statuses in reversed(periods.items())
    ]
    return {
        "count": sum(entry["count"] for entry in by_code),
        "by_code": by_code,
        "by_time": {"bucket": size, "rows": rows},
    }
