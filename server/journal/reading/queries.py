"""Reading the journal: filters, pages that stay stable while rows come and go, and rows as the API shows them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, literal, select

from server.encode import dumps
from server.journal.bounded import encoded_metadata
from server.journal.database import Database
from server.journal.reading.fields import shown
from server.journal.schema import DIAGNOSTICS, ROWS
from server.journal.words import LIVE, NONE

CHUNK = 500
"""Number of rows read at a time when streaming, so that no transaction stays open while a slow client reads."""

GROUPS = ("sage", "contrast")
"""Prefixes of intervention names that have filters of their own."""


def _names() -> ColumnElement[str]:
    """Return the names of a row's interventions, also for rows of an older server that does not store them."""
    row = ROWS.c
    conditions = {
        "steering": row.vectors != "|",
        "sage.see": row.sage_see.is_(True),
        "sage.think": row.sage_think.is_(True),
        "sage.generate": row.sage_generate.is_(True),
    }
    names: ColumnElement[str] = literal("|")
    for name, condition in conditions.items():
        names += case((condition, f"{name}|"), else_="")
    names += case((row.contrast != NONE, literal("contrast.") + row.contrast + "|"), else_="")
    return case((row.interventions != "|", row.interventions), else_=names)


NAMES = _names()
SHOWN = (*(column for column in ROWS.c if column.name != "interventions"), NAMES.label("interventions"))
"""The columns of a row as it is shown."""


@dataclass(frozen=True)
class Filters:
    """Filters on rows; None accepts all.

    `since` is inclusive, `until` exclusive, both Unix times of the request's acceptance.
    """

    since: float | None = None
    until: float | None = None
    model: str | None = None
    key_name: str | None = None
    preset: str | None = None
    vector: str | None = None
    toward: str | None = None
    sage: str | None = None
    contrast: str | None = None
    intervention: str | None = None
    flag: str | None = None
    finish_reason: str | None = None
    source: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    """Pairs of a key and its value, all of which a row has."""

    def where(self) -> ColumnElement[bool]:
        """Return the SQL condition of the filters."""
        row = ROWS.c
        terms: list[ColumnElement[bool]] = []
        if self.since is not None:
            terms.append(row.created >= self.since)
        if self.until is not None:
            terms.append(row.created < self.until)
        for name in ("model", "key_name", "preset", "toward", "finish_reason"):
            if (value := getattr(self, name)) is not None:
                terms.append(row[name] == value)
        if self.vector is not None:
            terms.append(_holds(row.vectors, f"|{self.vector}|"))
        if self.intervention is not None:
            none = self.intervention == NONE
            terms.append(NAMES == "|" if none else _holds(NAMES, f"|{self.intervention}|"))
        for name in GROUPS:
            if (value := getattr(self, name)) == NONE:
                terms.append(~_holds(NAMES, f"|{name}."))
            elif value is not None:
                terms.append(_holds(NAMES, f"|{name}.{value}|"))
        if self.flag is not None:
            own = self.flag in DIAGNOSTICS
            terms.append(row[self.flag].is_(True) if own else _holds(row.readouts, f"{dumps(self.flag)}:true"))
        if self.source is not None:
            terms.append(func.coalesce(row.source, LIVE) == self.source)  # an older server stored none
        terms += [has_metadata(row.metadata, key, value) for key, value in self.metadata]
        return and_(True, *terms)


def has_metadata(column: ColumnElement[Any], key: str, value: str) -> ColumnElement[bool]:
    """Return the condition that a column of encoded metadata has a pair of key and value."""
    # A quote within a key or a value is escaped, so that these texts occur only where a pair begins.
    pair = encoded_metadata({key: value})[1:-1]
    return func.coalesce(_holds(column, f"{{{pair}") | _holds(column, f",{pair}"), False)


def _holds(column: ColumnElement[str], text: str) -> ColumnElement[bool]:
    """Return the condition that a column contains a text."""
    # LIKE ignores case in SQLite, and other functions exist in only one of the databases.
    return func.replace(column, text, "") != column


@dataclass(frozen=True)
class Page:
    """Rows, newest first; `next` is the cursor of the next page, None at the end."""

    rows: list[dict[str, Any]]
    next: str | None


def page(
    connection: Connection, filters: Filters, limit: int, before: int | None = None, scalars: Collection[str] = ()
) -> Page:
    """Return the newest `limit` rows older than the key `before`, with the `scalars` of readouts, null if missing."""
    records = connection.execute(_newest(filters, before).limit(limit + 1)).mappings().all()
    more = len(records) > limit
    rows = [shown(row, scalars) for row in records[:limit]]
    return Page(rows, cursor(records[limit - 1]["key"]) if more else None)


def stream(
    database: Database,
    filters: Filters,
    limit: int | None = None,
    before: int | None = None,
    scalars: Collection[str] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Yield all matching rows, or the newest `limit`, in lists of up to CHUNK; later rows are not included."""
    while limit is None or limit > 0:
        size = CHUNK if limit is None else min(CHUNK, limit)
        with database.engine.connect() as connection:
            records = connection.execute(_newest(filters, before).limit(size)).mappings().all()
        if records:
            yield [shown(row, scalars) for row in records]
        if len(records) < size:
            return
        before = records[-1]["key"]
        limit = None if limit is None else limit - size


def answer(connection: Connection, identity: str, scalars: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of one answer, in order of choice."""
    chosen = select(*SHOWN).where(ROWS.c.id == identity).order_by(ROWS.c.choice, ROWS.c.key).limit(1024)
    return [shown(row, scalars) for row in connection.execute(chosen).mappings()]


def _newest(filters: Filters, before: int | None) -> Select[Any]:
    chosen = select(*SHOWN).where(filters.where()).order_by(ROWS.c.key.desc())
    return chosen if before is None else chosen.where(ROWS.c.key < before)


def cursor(key: int) -> str:
    """Return the opaque form of a place between two rows."""
    return base64.urlsafe_b64encode(b"%x" % key).decode().rstrip("=")


def place(text: str) -> int:
    """Return the key in a cursor; raises ValueError for anything else."""
    try:
        key = int(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True), 16)
    except binascii.Error as error:
        raise ValueError(text) from error
    if cursor(key) != text or not 0 <= key < 2**63:
        raise ValueError(text)
    return key
