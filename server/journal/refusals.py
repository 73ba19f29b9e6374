"""Requests that were refused and so left no row: counted by minute, status, code of the error and route. Nothing of what was
asked is kept."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from server.journal.queries import Filters
from server.journal.schema import REFUSALS

MINUTE = 60
KINDS = 4096
"""Counts that may wait to be written; what further kinds there are is not counted."""
LABEL = 64
EVERY = 1.0
"""Seconds between two writes at least: a flood of refusals must not keep the disk from the rows."""
MOST = 1000

Kind = tuple[int, int, str, str]
"""Minute, status, code and route."""

of = REFUSALS.c


class Refusals:
    """Counts that wait to be written; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Kind] = Counter()
        self._writing: Counter[Kind] = Counter()
        self._next = 0.0

    def add(self, status: int, code: str, route: str) -> bool:
        """Count one, now; returns whether there was room."""
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
        """Whether some wait, and the last write is long enough ago."""
        return bool(self) and time.monotonic() >= self._next

    def write(self, connection: Connection) -> None:
        """Add what waits to the table; `written` has to be called once that is committed."""
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
        """Forget what was written."""
        with self._lock:
            self._counts -= self._writing
            self._next = time.monotonic() + EVERY


def prune(connection: Connection, most: int, before: float) -> None:
    """Delete what was counted before a Unix time, and the oldest minutes beyond `most` counts."""
    connection.execute(delete(REFUSALS).where(of.minute < int(before // MINUTE)))
    newest = select(of.minute).order_by(of.minute.desc()).offset(most).limit(1)
    if (minute := connection.execute(newest).scalar()) is not None:
        connection.execute(delete(REFUSALS).where(of.minute <= minute))


def refusals(connection: Connection, filters: Filters, size: int) -> dict[str, Any]:
    """How many requests were refused in the filters' time, by kind and by period of `size` seconds; what else the filters
    say is of rows, and a refusal has none."""
    terms = []
    if filters.since is not None:
        terms.append(of.minute >= int(filters.since // MINUTE))
    if filters.until is not None:
        terms.append(of.minute < filters.until / MINUTE)
    total = func.sum(of["count"])
    kinds = select(of.status, of.code, of.route, total.label("n")).where(*terms).group_by(of.status, of.code, of.route)
    by_code = [
        {"status": one.status, "code": one.code, "route": one.route, "count": int(one.n)}
        for one in connection.execute(kinds.order_by(total.desc(), of.status, of.code, of.route).limit(MOST))
    ]
    period = of.minute // (size // MINUTE)
    counted = select(period, of.status, total).where(*terms).group_by(period, of.status)
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for at, status, count in connection.execute(counted.order_by(period.desc(), of.status)):
        if at not in found and len(found) == MOST:
            break
        found[at][str(status)] = int(count)
    rows = [
        {"start": at * size, "count": sum(statuses.values()), "statuses": statuses}
        for at, statuses in reversed(found.items())
    ]
    return {
        "count": sum(one["count"] for one in by_code),
        "by_code": by_code,
        "by_time": {"bucket": size, "rows": rows},
    }
