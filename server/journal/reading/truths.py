"""Answers of the journal that somebody has judged."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, select

from server.journal.database import Place, open_database
from server.journal.errors import JournalError
from server.journal.queries import Filters
from server.journal.schema import DIAGNOSTICS, ROWS


def judged(connection: Connection, filters: Filters) -> list[dict[str, Any]]:
    """Return the judged answers that match, the oldest first: whether each is `right`, its `intervention`, its `numbers`.

    Answers of several choices are left out, since the truth is about one of them.
    """
    row = ROWS.c
    columns = [row[name] for name in ("model", "intervention", "answer_correct", "sampling", "readouts", *DIAGNOSTICS)]
    chosen = select(*columns).where(filters.where(), row.answer_correct.is_not(None)).order_by(row.key)
    return [
        {
            "model": found["model"],
            "intervention": found["intervention"],
            "right": bool(found["answer_correct"]),
            "numbers": {name: found[name] for name in DIAGNOSTICS} | json.loads(found["readouts"] or "{}"),
        }
        for found in connection.execute(chosen).mappings()
        if json.loads(found["sampling"]).get("n", 1) == 1
    ]


def judged_of(setting: str, filters: Filters) -> list[dict[str, Any]]:
    """Return the judged answers of a journal, which is opened for it; raises ValueError if it cannot be read."""
    try:
        database = open_database(Place.of(setting), create=False)
        try:
            with database.engine.connect() as connection:
                return judged(connection, filters)
        finally:
            database.close()
    except JournalError as error:
        raise ValueError(str(error)) from None
