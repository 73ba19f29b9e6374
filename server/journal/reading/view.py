"""The view `helmsight_answers`: the journal's rows in SQL, with the names and the fields of every other form."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlalchemy import Column, ColumnElement, Connection, func, inspect, literal_column, select, text
from sqlalchemy.exc import SQLAlchemyError

from server.journal.database import Database
from server.journal.reading.fields import LISTS, SAMPLING, columns
from server.journal.reading.queries import NAMES
from server.journal.schema import DIAGNOSTICS, ROWS

log = logging.getLogger("helmsight")

VIEW = "helmsight_answers"
_KINDS = {float: "double precision", int: "numeric", bool: "boolean"}


def refresh(database: Database) -> tuple[str, ...]:
    """Create the view anew if it lacks a number that readouts keep; return the numbers that it has beside `DIAGNOSTICS`.

    A database that refuses it keeps its rows all the same.
    """
    kinds = scalars()
    try:
        with database.writer.begin() as connection:
            if _names(connection) != columns(kinds):
                connection.execute(text(f"DROP VIEW IF EXISTS {VIEW}"))
                connection.execute(text(f"CREATE VIEW {VIEW} AS {_definition(connection, kinds)}"))
    except SQLAlchemyError as error:
        log.warning("journal: the view %s could not be made: %s", VIEW, database.explain(error))
    return tuple(kinds)


def view_numbers(database: Database) -> tuple[str, ...]:
    """Return the numbers that the view has beside `DIAGNOSTICS`, without torch if a server has made it."""
    with database.engine.connect() as connection:
        names = _names(connection)
    own = columns(())
    numbers = tuple(name for name in names if name not in own)
    return numbers if names and names == columns(numbers) else refresh(database)


def scalars() -> dict[str, type]:
    """Return the numbers of readouts that have no column of their own, with their types."""
    # Imported late, so that commands that read a database do not wait for torch.
    from steering.protocol.readout import REGISTRY  # noqa: PLC0415
    from steering.readouts import registry  # noqa: F401, PLC0415 -- fills it

    declared = {name: kind for readout in REGISTRY.values() for name, kind in readout.scalars.items()}
    return {name: kind for name, kind in declared.items() if name not in DIAGNOSTICS}


def _names(connection: Connection) -> tuple[str, ...]:
    """Return the view's columns, none if there is no view."""
    inspector = inspect(connection)
    return tuple(column["name"] for column in inspector.get_columns(VIEW)) if VIEW in inspector.get_view_names() else ()


def _definition(connection: Connection, kinds: Mapping[str, type]) -> str:
    """Return the view's query."""
    postgres = connection.dialect.name == "postgresql"

    def within(column: str, name: str, kind: type) -> ColumnElement[object]:
        if postgres:
            return literal_column(f"({column}::json ->> '{name}')::{_KINDS[kind]}")
        return literal_column(f"json_extract({column}, '$.\"{name}\"')")

    expressions: dict[str, ColumnElement[object] | Column[object]] = {
        **{name: within("sampling", name, kind) for name, kind in SAMPLING.items()},
        **{name: within("readouts", name, kind) for name, kind in kinds.items()},
    }
    expressions |= {
        name: func.replace(func.trim(NAMES if name == "interventions" else ROWS.c[name], "|"), "|", " ")
        for name in LISTS
    }
    chosen = select(*(expressions.get(name, ROWS.c.get(name)).label(name) for name in columns(kinds)))  # type: ignore[union-attr]
    return str(chosen.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
