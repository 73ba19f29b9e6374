"""`helmsight journal backup | export | prune | summary`: the journal without a server and without loading a model."""

from __future__ import annotations

import csv
import json as jsons
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, BadParameter, CallbackParam, Option

from probes.harness.options import Command, flag, with_flags
from server.commands.options import Config, settings_of, show
from server.journal.reading.times import unix_time
from server.journal.words import LIVE, UNFINISHED, WORDED

if TYPE_CHECKING:
    from server.journal.database import Database
    from server.journal.reading.queries import Filters
    from server.settings import Settings

Journal = Annotated[str | None, Option(metavar="PATH|URL", help="the journal to use (default: that of the settings)")]


def register(app: typer.Typer) -> None:
    """Add the `journal` command with its parts."""
    parts = typer.Typer(no_args_is_help=True)
    filters = _filters()
    parts.command("backup", cls=Command)(backup)
    parts.command("export", cls=Command)(with_flags(export, filters))
    parts.command("prune", cls=Command)(prune)
    parts.command("scores", cls=Command)(with_flags(scores, filters))
    parts.command("summary", cls=Command)(with_flags(summary, filters))
    app.add_typer(parts, name="journal")


def _filters() -> list[Any]:
    """Return a flag for each of `queries.Filters`."""
    filters = partial(Option, rich_help_panel="Which answers")
    time = "Unix seconds, 2026-11-21 or 2026-11-21T10:00 (local time), or an age such as 12h, 1d, 2w"
    return [
        *(flag(name, float | None, filters(parser=_time, metavar="TIME", help=time)) for name in ("since", "until")),
        flag("model", str | None, filters(help="name of the model")),
        flag("key_name", str | None, filters(help="name of the request's key")),
        flag("preset", str | None, filters(help="name of the requested preset")),
        flag("vector", str | None, filters(help="name of a requested steering vector")),
        *(
            flag(name, str | None, filters(callback=_word, metavar="WORD", help=words.about))
            for name, words in WORDED.items()
        ),
        flag(
            "metadata",
            list[str] | None,
            filters(callback=_pairs, metavar="KEY=VALUE", help="metadata of the request (repeatable)"),
        ),
    ]


def _pairs(pairs: list[str] | None) -> list[str] | None:
    if wrong := [pair for pair in pairs or () if not pair.partition("=")[1]]:
        raise BadParameter(f"{wrong[0]!r} is not KEY=VALUE")
    return pairs


def _chosen(flags: dict[str, Any]) -> Filters:
    """Return the filters of a command line."""
    from server.journal.reading.queries import Filters

    pairs = tuple((key, value) for key, _, value in (pair.partition("=") for pair in flags.get("metadata") or ()))
    return Filters(**flags | {"metadata": pairs})


def _word(param: CallbackParam, word: str | None) -> str | None:
    if word is not None:
        try:
            WORDED[str(param.name)].check(str(param.name), word)
        except ValueError as error:
            raise BadParameter(str(error)) from None
    return word


def _time(text: str) -> float:
    try:
        return unix_time(text)
    except ValueError as error:
        raise BadParameter(str(error)) from None


@contextmanager
def _opened(settings: Settings, upgrade: bool = True) -> Iterator[Database]:
    """Open the journal of the settings, migrated if `upgrade`; its errors become one line and status 1."""
    from sqlalchemy.exc import SQLAlchemyError

    from server.journal.database import Place, open_database
    from server.journal.errors import JournalError

    setting = settings.journal.get_secret_value()
    if setting.strip().lower() == "off":
        raise ValueError("the journal is switched off; name one with --journal")
    database = None
    try:
        database = open_database(Place.of(setting), create=False, upgrade=upgrade)
        yield database
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has left; the interpreter must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (JournalError, SQLAlchemyError) as error:
        raise ValueError(str(error if database is None else database.explain(error))) from None
    finally:
        if database is not None:
            database.close()


def backup(
    file: Annotated[Path, Argument(metavar="FILE", help="file to write, which only its owner may read")],
    replace: Annotated[bool, Option("--replace", help="overwrite an existing file")] = False,
    config: Config = None,
    journal: Journal = None,
) -> None:
    """Copy the journal as of one moment, also while servers write to it, and the images of stored responses.

    The images go to the folder FILE.pictures, where a journal of that name has them. The copy of a SQLite journal is one
    itself; a journal in PostgreSQL is written by pg_dump, for pg_restore. Neither is migrated, so that the version before
    can still use it.
    """
    from server.journal.backup import back_up, back_up_pictures

    if file.exists() and not replace:
        raise FileExistsError(f"{file} already exists; --replace overwrites it")
    settings = settings_of(config, journal=journal)
    with _opened(settings, upgrade=False) as database:
        print(f"{file}: {back_up(database, file):,} bytes")
        folder, count, size = back_up_pictures(settings.journal.get_secret_value(), file)
        if count:
            print(f"{folder}: {size:,} bytes, {count} images of stored responses")


def export(
    limit: Annotated[int | None, Option(min=1, help="largest number of rows (default: all)")] = None,
    format: Annotated[
        Literal["jsonl", "csv", "parquet"], Option(help="format; parquet needs the extra parquet")
    ] = "jsonl",
    config: Config = None,
    journal: Journal = None,
    **filters: Any,
) -> None:
    """Write rows to standard output, the answers that ended last first."""
    from server.encode import dumps
    from server.journal.reading.fields import cells, columns
    from server.journal.reading.parquet import check_parquet, write_parquet
    from server.journal.reading.queries import stream
    from server.journal.reading.view import view_numbers

    if format == "parquet":
        check_parquet(sys.stdout.isatty())
    with _opened(settings_of(config, journal=journal)) as database:
        scalars = view_numbers(database)
        chunks = stream(database, _chosen(filters), limit, scalars=scalars)
        if format == "parquet":
            write_parquet(sys.stdout.buffer, chunks)
            return
        rows = (row for chunk in chunks for row in chunk)
        if format == "jsonl":
            for row in rows:
                print(dumps(row))
        else:
            writer = csv.DictWriter(sys.stdout, names := columns(scalars))
            writer.writeheader()
            writer.writerows(cells(row, names) for row in rows)


def scores(
    to: Annotated[Literal["langfuse", "phoenix"], Option(help="tool that gets the scores")],
    url: Annotated[str, Option(metavar="URL", help="address of the tool, such as http://localhost:6006")],
    config: Config = None,
    journal: Journal = None,
    **filters: Any,
) -> None:
    """Send readouts' numbers, flags and truths as scores to a tool that has the traces; scores sent before are replaced.

    The keys are read from LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY, or PHOENIX_API_KEY.
    """
    from server.journal.reading.queries import stream
    from server.telemetry.score_export import send

    with _opened(settings_of(config, journal=journal)) as database:
        rows = (row for chunk in stream(database, _chosen(filters)) for row in chunk)
        sent, untraced = send(rows, to, url, os.environ)
    print(f"{sent} scores sent" + (f"; {untraced} rows without a trace were left out" if untraced else ""))


def prune(
    journal_days: Annotated[float | None, Option("--days", help="days a row is kept")] = None,
    journal_max_rows: Annotated[int | None, Option("--max-rows", help="number of newest rows kept")] = None,
    vacuum: Annotated[
        bool,
        Option(
            "--vacuum", help="also return free space to the disk (SQLite; needs as much free disk space while it runs)"
        ),
    ] = False,
    config: Config = None,
    journal: Journal = None,
) -> None:
    """Delete old rows now, as a running server does by itself; their space is kept for new rows unless vacuumed."""
    from sqlalchemy import func, select

    from server.journal import retention
    from server.journal.schema import ROWS

    settings = settings_of(config, journal=journal, journal_days=journal_days, journal_max_rows=journal_max_rows)
    count = select(func.count()).select_from(ROWS)
    before = time.time() - settings.journal_days * retention.DAY
    with _opened(settings) as database:
        with database.engine.connect() as connection:
            rows = connection.execute(count).scalar_one()
        more = True
        while more:
            with database.writer.begin() as connection:
                more = retention.prune(connection, settings.journal_max_rows, before) >= retention.BATCH
        with database.engine.connect() as connection:
            remaining = connection.execute(count).scalar_one()
        if vacuum and database.place.path is not None:
            with closing(database.engine.raw_connection()) as raw:  # begins no transaction
                raw.cursor().execute("VACUUM")
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        print(f"{rows - remaining} rows deleted, {remaining} left")


def summary(
    json: Annotated[bool, Option("--json", help="write JSON, as GET /v1/diagnostics/summary does")] = False,
    config: Config = None,
    journal: Journal = None,
    **filters: Any,
) -> None:
    """Show counts, means and quantiles."""
    from server.journal.summary import summarise

    with _opened(settings_of(config, journal=journal)) as database, database.engine.connect() as connection:
        report = summarise(connection, _chosen(filters))
    if json:
        print(jsons.dumps(report, indent=2, ensure_ascii=False))
        return
    reasons = ", ".join(f"{number} {reason}" for reason, number in report["finish_reasons"].items())
    sampled = "" if report["sampled"] == report["count"] else f"; the figures cover the newest {report['sampled']:,}"
    broken = any(reason in UNFINISHED for reason in report["finish_reasons"])
    note = "; times and tokens cover completed answers only" if broken else ""
    if report["sources"].keys() - {LIVE}:
        note = f"{note}; {', '.join(f'{number} {source}' for source, number in report['sources'].items())}"
    print(f"{report['count']} answers{f' ({reasons})' if reasons else ''}{sampled}{note}")
    values = ("count", "mean", "min", "p10", "p50", "p90", "max")
    groups = ("count", "attention_ratio", "focus_share", "decay_slope", "accuracy")
    rates = [[name, flag["known"], flag["raised"]] for name, flag in report["flags"].items()]
    rates.append(["focus on the target", report["focus"]["known"], report["focus"]["correct"]])
    rates.append(["right, but focus wrong (IVM)", report["ivm"]["known"], report["ivm"]["implicit"]])
    for head, rows in (
        (("value", *values), [[name, *(v[c] for c in values)] for name, v in report["values"].items() if v["count"]]),
        (("intervention", *groups), [[g["intervention"], *(g[c] for c in groups)] for g in report["by_intervention"]]),
        (("rate", "known", "true", "share"), [[*rate, rate[2] / rate[1]] for rate in rates if rate[1]]),
    ):
        if rows:
            print()
            show(head, rows)
