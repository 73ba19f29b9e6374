"""Deleting old rows in bounded batches, so that nobody waits long for the write lock."""

from __future__ import annotations

import time

from sqlalchemy import Connection, Table, delete, func, select

from server.journal import refusals
from server.journal.schema import ROWS, STORED

DAY = 86_400.0
BATCH = 1000


def prune(connection: Connection, max_rows: int, before: float, batch: int = BATCH) -> int:
    """Delete up to `batch` rows created before a Unix time, and as many beyond the newest `max_rows`.

    Stored completions are pruned likewise, and counts of refusals too, but all at once. Returns the largest number deleted
    of one table; fewer than `batch` means that no more are left to delete. The newest rows are those with the largest keys.
    """
    refusals.prune(connection, max_rows, before)
    return max(_pruned(connection, table, max_rows, before, batch) for table in (ROWS, STORED))


def _pruned(connection: Connection, table: Table, max_rows: int, before: float, batch: int) -> int:
    key = table.c.key
    old = select(key).where(table.c.created < before).order_by(table.c.created).limit(batch)
    deleted = connection.execute(delete(table).where(key.in_(old))).rowcount
    surplus = min(_count(connection, table, max_rows) - max_rows, batch)
    if surplus > 0:
        oldest = select(key).order_by(key).limit(surplus)
        deleted = max(deleted, connection.execute(delete(table).where(key.in_(oldest))).rowcount)
    return int(deleted)


def _count(connection: Connection, table: Table, enough: int) -> int:
    """Return the number of rows, or an upper bound if that is at most `enough`, since counting reads a whole index."""
    ends = (select(end(table.c.key)).scalar_subquery() for end in (func.min, func.max))
    first, last = connection.execute(select(*ends)).one()
    if first is None or last - first < enough:
        return 0 if first is None else int(last - first + 1)
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


class Clock:
    """The clock for the age of rows: the wall clock, but never ahead of the time elapsed since the start.

    If the clock jumps forward while the server runs, nothing is deleted early; if it jumps back, rows are deleted later. A
    server started with a wrong clock uses that. Rows from the future stay until that time, or until there are too many.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the Unix time."""
        return min(time.time(), self._offset + time.monotonic())
