"""Summaries of a journal of 100,000 rows, for `benchmarks.versions`, which runs them with the server of either checkout."""

from __future__ import annotations

import atexit
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from server.encode import dumps
from server.journal.database import Database, Place, open_database
from server.journal.reading.queries import Filters, page
from server.journal.schema import ROWS
from server.journal.summary import summarise

DAY = 86_400
END = 1_700_000_000.0
DAYS = 30
COUNT = 100_000
CHUNK = 10_000
ASKED = {
    "30 days": Filters(since=END - DAYS * DAY, until=END),
    "the last day": Filters(since=END - DAY, until=END),
    "30 days, steered": Filters(since=END - DAYS * DAY, until=END, intervention="steering"),
}


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Yield answers at random times of DAYS days.

    A third of them is steered, some have readouts without a column of their own.
    """
    generator = random.Random(0)
    for i, created in enumerate(sorted(generator.uniform(END - DAYS * DAY, END) for _ in range(count))):
        steered, observed = i % 3 == 0, i % 2 == 0
        real = generator.random
        yield {
            "id": f"chatcmpl-{i}", "choice": 0, "created": created, "hour": int(created // 3600), "model": "demo",
            "finish_reason": "error" if i % 50 == 0 else "stop", "streamed": True,
            "intervention": "steer:vision" if steered else "none", "toward": "vision" if steered else "none",
            "sage_see": False, "sage_think": False, "sage_generate": False, "contrast": "none",
            "vectors": "|modality|" if steered else "|", "interventions": "|steering|" if steered else "|",
            "prompt_tokens": 60, "completion_tokens": generator.randrange(1, 200), "images": 1 + i % 2,
            "first_token": real() if i % 20 else None, "total": 1 + 3 * real(), "attention_ratio": real(),
            "focused_image": 1, "focus_share": real(), "target_image": 1, "correct": real() < 0.9,
            "decay_slope": real() - 0.5, "kl": real() if observed else None, "perceptual_blindness": real() < 0.1,
            "dissociation": real() < 0.1, "dose": real() if steered else None, "answer_correct": None,
            "sampling": '{"temperature":0.0,"max_tokens":200}',
            "asked": '{"steering":null,"sage":null,"contrast":null,"diagnostics":true}',
            "applied": None, "metadata": None, "prompt": None, "answer": None,
            "readouts": dumps({"anchor": real(), "drift": real() < 0.1}) if observed else None,
        }  # fmt: skip


def fill(database: Database, count: int) -> None:
    """Write `count` rows."""
    chunk = []
    for row in rows(count):
        chunk.append(row)
        if len(chunk) == CHUNK or row["id"] == f"chatcmpl-{count - 1}":
            with database.writer.begin() as connection:
                connection.execute(insert(ROWS), chunk)
            chunk = []


def workloads(postgres: str | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield summaries by name, over a journal in SQLite and, given the URL of an empty database, one in PostgreSQL."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    places = {"SQLite": str(Path(folder.name) / "journal.db")} | ({"PostgreSQL": postgres} if postgres else {})
    for kind, place in places.items():
        database = open_database(Place.of(place))
        with database.engine.connect() as connection:
            empty = not page(connection, Filters(), 1).rows
        if empty:  # not yet filled by the other side
            fill(database, COUNT)
        # PostgreSQL's own time is not part of this process's CPU time.
        run = summary if kind == "SQLite" else seconds
        for name, filters in ASKED.items():
            yield f"{kind}, {name}", partial(run, database, filters)


def summary(database: Database, filters: Filters) -> None:
    """Compute a single summary."""
    with database.engine.connect() as connection:
        summarise(connection, filters)


def seconds(database: Database, filters: Filters) -> float:
    """Return the seconds that a summary takes."""
    started = time.perf_counter()
    summary(database, filters)
    return time.perf_counter() - started
