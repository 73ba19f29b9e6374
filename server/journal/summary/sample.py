"""The rows that a summary is computed from, copied into temporary tables, since scanning the journal itself is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    case,
    cast,
    func,
    insert,
    null,
    select,
)

from server.journal.reading.queries import Filters
from server.journal.schema import FLAGS, ROWS
from server.journal.words import UNFINISHED

VALUES = (
    "attention_ratio", "focus_share", "decay_slope", "kl", "dose", "first_token", "total", "completion_tokens",
)  # fmt: skip
OF_WHOLE = ("first_token", "total", "completion_tokens")
"""Values of complete answers only, since answers that clients gave up at once would make all look fast."""
MEANS = ("attention_ratio", "focus_share", "decay_slope")

NEEDED = (
    *VALUES, *FLAGS, "hour", "finish_reason", "intervention", "correct", "answer_correct", "readouts", "source", "guard",
)  # fmt: skip
SAMPLED = Table(
    "helmsight_journal_sample",
    MetaData(),
    *(Column(name, ROWS.c[name].type) for name in NEEDED),
    Column("minute", Integer),
    prefixes=["TEMPORARY"],
)
"""The sampled rows with the columns that the statistics need."""

MORE = Table(
    "helmsight_journal_more",
    MetaData(),
    *(
        Column(name, kind)
        for name, kind in (("name", Text), ("value", Double), ("truth", Boolean), ("minute", Integer))
    ),
    prefixes=["TEMPORARY"],
)
"""Values of readouts without a column, one number or truth value per row."""


@contextmanager
def sampled(connection: Connection, filters: Filters, most: int) -> Iterator[int]:
    """Fill SAMPLED and MORE with at most `most` of the newest matching rows, and drop them again; yields the number."""
    minute = ROWS.c.created / 60
    sqlite = connection.dialect.name == "sqlite"  # it may lack floor, and its cast truncates
    whole_minute = cast(minute, Integer) if sqlite else func.floor(minute)
    ended = ROWS.c.finish_reason.not_in(UNFINISHED)
    newest = select(
        *(case((ended, ROWS.c[name])) if name in OF_WHOLE else ROWS.c[name] for name in NEEDED), whole_minute
    )
    newest = newest.where(filters.where(), ROWS.c.key >= _oldest(filters, most))
    SAMPLED.create(connection, checkfirst=False)
    connection.execute(insert(SAMPLED).from_select((*NEEDED, "minute"), newest))
    MORE.create(connection, checkfirst=False)
    connection.execute(insert(MORE).from_select(("name", "value", "truth", "minute"), _readout_values(sqlite)))
    yield connection.execute(select(func.count()).select_from(SAMPLED)).scalar_one()
    for table in (SAMPLED, MORE):
        table.drop(connection, checkfirst=False)


def _oldest(filters: Filters, most: int) -> ColumnElement[int]:
    """Return a key from which on `most` rows match, or all that match."""
    key = ROWS.c.key
    first, last = (select(end(key)).scalar_subquery() for end in (func.min, func.max))
    # Only keys are sorted, because whole rows are wide, and none if there are at most that many rows.
    oldest = select(key).where(filters.where()).order_by(key.desc()).limit(1).offset(most - 1).scalar_subquery()
    return case((last - first < most, first), else_=func.coalesce(oldest, first))


def _readout_values(sqlite: bool) -> Select[Any]:
    """Select name, number and truth value, one of them null, and minute of everything in the sample's `readouts`."""
    of = SAMPLED.c
    if sqlite:
        each = func.json_each(of.readouts).table_valued("key", "value", "type")
        number = case((each.c.type.in_(("integer", "real")), each.c.value), else_=null())
        truth = case((each.c.type.in_(("true", "false")), each.c.value), else_=null())
    else:
        each = func.json_each_text(cast(of.readouts, JSON)).table_valued("key", "value")
        is_truth = each.c.value.in_(("true", "false"))
        number = case((is_truth, null()), else_=cast(each.c.value, Double))
        truth = case((is_truth, cast(each.c.value, Boolean)), else_=null())
    return select(each.c.key, number, truth, of.minute).select_from(SAMPLED.join(each, of.readouts.is_not(None)))


def times(condition: ColumnElement[bool]) -> ColumnElement[int]:
    """Return the number of rows that meet a condition."""
    return func.count(case((condition, 1)))


def real(value: Any) -> float | None:
    """Return a number of the database, which may be a Decimal, as a float."""
    return None if value is None else float(value)
