"""Access of routes to the journal's database."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from server.context import context
from server.errors import ApiError
from server.journal.database import Database
from server.journal.errors import REASONS, JournalError

log = logging.getLogger("helmsight")


@contextmanager
def reading() -> Iterator[Database]:
    """Yield the database; its errors become a 503 without internal details."""
    journal = context().journal
    if not journal.enabled:
        raise ApiError(503, "The journal is switched off on this server.", code="journal_off")
    database = None
    try:
        database = journal.database()
        yield database
    except (JournalError, SQLAlchemyError) as error:
        problem = error if isinstance(error, JournalError) or database is None else database.explain(error)
        reason = problem.reason if isinstance(problem, JournalError) else "failed"
        log.error("journal: reading failed: %s", problem)
        raise ApiError(
            503, f"The journal cannot be read: {REASONS[reason]}.", code="journal_unavailable", retry_after=5.0
        ) from None
