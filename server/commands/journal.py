"""`helmsight journal export | prune | summary`: the journal without a server, and without loading a model."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from server import settings as server_settings
from server.journal.words import WORDED

if TYPE_CHECKING:
    from server.journal.database import Database
    from server.journal.queries import Filters

SETTINGS = ("journal", "journal_days", "journal_max_rows")


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the `journal` command; each part sets `func`, called with the parsed arguments."""
    journal = subparsers.add_parser("journal", help="export, prune or summarise the journal of answers")
    parts = journal.add_subparsers(title="commands", required=True, metavar="COMMAND")

    part = parts.add_parser("export", help="write rows to standard output, newest first")
    _add_filters(part)
    part.add_argument("--limit", type=_count, help="at most so many rows (default: all)")
    part.add_argument("--format", choices=("jsonl", "csv"), default="jsonl", help="default: %(default)s")
    part.set_defaults(func=_command(export))

    part = parts.add_parser("prune", help="delete old rows now; a running server does so by itself")
    part.add_argument("--days", type=float, dest="journal_days", default=argparse.SUPPRESS, help="days a row is kept")
    part.add_argument(
        "--max-rows", type=int, dest="journal_max_rows", default=argparse.SUPPRESS, help="rows kept, the newest ones"
    )
    part.set_defaults(func=_command(prune))

    part = parts.add_parser("summary", help="counts, means and quantiles")
    _add_filters(part)
    part.add_argument("--json", action="store_true", help="as GET /v1/diagnostics/summary gives it")
    part.set_defaults(func=_command(summary))

    for part in parts.choices.values():
        part.add_argument("--config", metavar="FILE", help="TOML file with settings")
        part.add_argument(
            "--journal", default=argparse.SUPPRESS, metavar="PATH|URL", help="default: that of the settings"
        )


def _add_filters(part: argparse.ArgumentParser) -> None:
    for name in ("since", "until"):
        part.add_argument(
            f"--{name}", type=_time, metavar="TIME", help="Unix seconds, or 2026-11-21T10:00 (local time)"
        )
    part.add_argument("--model", help="name of the model")
    part.add_argument("--vector", help="name of a steering vector that was asked for")
    for name, words in WORDED.items():
        option = f"--{name.replace('_', '-')}"
        part.add_argument(option, type=partial(_word, name), metavar="WORD", help=words.about)


def _word(name: str, text: str) -> str:
    try:
        WORDED[name].check(name, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = datetime.fromisoformat(text).timestamp()
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _command(work: Callable[[Database, argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """A command on an open journal; what is wrong with the journal becomes one line and status 1."""

    def run(arguments: argparse.Namespace) -> int:
        from sqlalchemy.exc import SQLAlchemyError

        from server.journal.database import Place, open_database
        from server.journal.errors import JournalError

        given = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
        settings = server_settings.load_settings(given, config=arguments.config)
        setting = settings.journal.get_secret_value()
        if setting.strip().lower() == "off":
            print("helmsight: the journal is switched off; name one with --journal", file=sys.stderr)
            return 1
        arguments.settings = settings
        database = None
        try:
            database = open_database(Place.of(setting), create=False)
            work(database, arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has seen enough; the interpreter must not try to flush the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (JournalError, SQLAlchemyError) as error:
            problem = error if database is None else database.explain(error)
            print(f"helmsight: {problem}", file=sys.stderr)
            return 1
        finally:
            if database is not None:
                database.close()
        return 0

    return run


def _filters(arguments: argparse.Namespace) -> Filters:
    from server.journal.queries import Filters

    return Filters(**{one.name: getattr(arguments, one.name) for one in fields(Filters)})


def export(database: Database, arguments: argparse.Namespace) -> None:
    """Write rows as JSON lines or as CSV."""
    from server.encode import dumps
    from server.journal.queries import stream

    rows = (row for chunk in stream(database, _filters(arguments), arguments.limit) for row in chunk)
    if arguments.format == "jsonl":
        for row in rows:
            print(dumps(row))
        return
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    writer.writerows(map(flat, rows))


COLUMNS = (
    "id", "choice", "created", "model", "finish_reason", "streamed", "interventions", "temperature", "top_p", "max_tokens",
    "seed", "n", "prompt_tokens", "completion_tokens", "images", "first_token", "total", "attention_ratio", "focused_image",
    "focus_share", "target_image", "correct", "decay_slope", "kl", "perceptual_blindness", "dissociation", "dose",
    "readouts", "asked", "applied", "metadata", "prompt", "answer",
)  # fmt: skip


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row for a table: nested numbers in columns of their own, the rest as JSON."""
    from server.encode import dumps
    from server.journal.schema import DIAGNOSTICS

    more = dict(row["diagnostics"])
    nested: dict[str, Any] = {name: more.pop(name) for name in DIAGNOSTICS}
    for name in ("sampling", "usage", "latency", "texts"):
        nested |= row[name] or {}
    nested |= {name: None if row[name] is None else dumps(row[name]) for name in ("asked", "applied", "metadata")}
    nested |= {"interventions": " ".join(row["interventions"]), "readouts": dumps(more) if more else None}
    found = {**row, **nested}
    return {name: found.get(name) for name in COLUMNS}


def prune(database: Database, arguments: argparse.Namespace) -> None:
    """Delete what is older or more than the settings say."""
    from sqlalchemy import func, select

    from server.journal import retention
    from server.journal.schema import ROWS

    settings: server_settings.Settings = arguments.settings
    count = select(func.count()).select_from(ROWS)
    before = time.time() - settings.journal_days * retention.DAY
    with database.engine.connect() as connection:
        rows = connection.execute(count).scalar_one()
    more = True
    while more:
        with database.writer.begin() as connection:
            more = retention.prune(connection, settings.journal_max_rows, before) >= retention.BATCH
    with database.engine.connect() as connection:
        left = connection.execute(count).scalar_one()
    print(f"{rows - left} rows deleted, {left} left")


def summary(database: Database, arguments: argparse.Namespace) -> None:
    """Print the summary as tables, or as JSON."""
    from server.journal.summary import summarise

    with database.engine.connect() as connection:
        found = summarise(connection, _filters(arguments))
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    reasons = ", ".join(f"{number} {reason}" for reason, number in found["finish_reasons"].items())
    sampled = "" if found["sampled"] == found["count"] else f"; the figures are of the newest {found['sampled']:,}"
    print(f"{found['count']} answers{f' ({reasons})' if reasons else ''}{sampled}")
    values = ("count", "mean", "min", "p10", "p50", "p90", "max")
    _table(("value", *values), ([name, *(v[c] for c in values)] for name, v in found["values"].items() if v["count"]))
    groups = ("count", "attention_ratio", "focus_share", "decay_slope", "accuracy")
    _table(("intervention", *groups), ([g["intervention"], *(g[c] for c in groups)] for g in found["by_intervention"]))
    rates = [[name, flag["known"], flag["raised"]] for name, flag in found["flags"].items()]
    rates.append(["focus on the target", found["focus"]["known"], found["focus"]["correct"]])
    rates.append(["right, but focus wrong (IVM)", found["ivm"]["known"], found["ivm"]["implicit"]])
    _table(("rate", "known", "true", "share"), ([*rate, rate[2] / rate[1]] for rate in rates if rate[1]))


def _table(head: tuple[str, ...], rows: Iterable[list[Any]]) -> None:
    """A table under an empty line; nothing where there are no rows."""
    lines = [head, *([_cell(value) for value in row] for row in rows)]
    if len(lines) == 1:
        return
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    print()
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
