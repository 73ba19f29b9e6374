"""Which rows a journal holds, and how many."""

from __future__ import annotations

from sqlalchemy import func, select

from server.journal.database import Database
from server.journal.queries import Filters, page
from server.journal.schema import ROWS


def ids(database: Database, filters: Filters | None = None, limit: int = 100) -> list[int]:
    """The numbers of the rows that match, newest first."""
    with database.engine.connect() as connection:
        return [int(r["id"].removeprefix("chatcmpl-")) for r in page(connection, filters or Filters(), limit).rows]


def count(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(ROWS)).scalar_one())
