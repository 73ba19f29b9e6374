"""Answers of the journal that somebody has judged, and the truths that come later."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, func, select, update

from server.journal.bounded import encoded_metadata
from server.journal.database import Place, open_database
from server.journal.errors import JournalError
from server.journal.reading.queries import Filters
from server.journal.schema import DIAGNOSTICS, ROWS, STORED
from server.journal.words import BENCHMARKS, LIVE
from server.wire.storing.metadata import MAX_METADATA, truth


def judged(connection: Connection, filters: Filters) -> list[dict[str, Any]]:
    """Return the judged answers that match, the oldest first: whether each is `right`, its `intervention`, its `numbers`.

    Answers of several choices are left out, since the truth is about one of them. Those of benchmarks and probes are, unless
    the filters name that source: they say nothing of the traffic.
    """
    row = ROWS.c
    live = [] if filters.source is not None else [func.coalesce(row.source, LIVE).not_in(BENCHMARKS)]
    columns = [row[name] for name in ("model", "intervention", "answer_correct", "sampling", "readouts", *DIAGNOSTICS)]
    chosen = select(*columns).where(filters.where(), *live, row.answer_correct.is_not(None)).order_by(row.key)
    return [
        {
            "model": record["model"],
            "intervention": record["intervention"],
            "right": bool(record["answer_correct"]),
            "numbers": {name: record[name] for name in DIAGNOSTICS} | json.loads(record["readouts"] or "{}"),
        }
        for record in connection.execute(chosen).mappings()
        if json.loads(record["sampling"]).get("n", 1) == 1
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


def add_metadata(connection: Connection, identity: str, pairs: dict[str, str], key_name: str | None) -> bool:
    """Add pairs of metadata to the rows of an answer, and to the stored one; return whether there is such an answer.

    `key_name` is the key whose answer it must be, None for any. Raises ValueError if it would have too many pairs.
    """
    row = ROWS.c
    chosen = (row.id == identity, *(() if key_name is None else (row.key_name == key_name,)))
    record = connection.execute(select(row.metadata).where(*chosen).limit(1)).first()
    if record is None:
        return False
    metadata = {**json.loads(record[0] or "{}"), **pairs}
    if len(metadata) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} pairs of metadata")
    text, right = encoded_metadata(metadata), truth(metadata, "answer_correct")
    connection.execute(update(ROWS).where(*chosen).values(metadata=text, answer_correct=right))
    stored = STORED.c
    connection.execute(update(STORED).where(stored.id == identity, stored.completion != "").values(metadata=text))
    return True
