"""Helpers that list and count a journal's rows."""

from __future__ import annotations

from sqlalchemy import func, select

from server.journal.database import Database
from server.journal.reading.queries import Filters, page
from server.journal.schema import ROWS


def ids(database: Database, filters: Filters | None = None, limit: int = 100) -> list[int]:
    """Return the numbers of the matching rows, newest first."""
    with database.engine.connect() as connection:
        return [int(r["id"].removeprefix("chatcmpl-")) for r in page(connection, filters or Filters(), limit).rows]


def count(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(ROWS)).scalar_one())
