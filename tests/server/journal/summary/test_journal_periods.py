"""Answers over time, in SQLite and in a real PostgreSQL: periods, and what is counted in each."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from server.encode import dumps
from server.journal.database import Database
from server.journal.reading.queries import Filters
from server.journal.summary import summarise
from server.journal.summary.periods import DAY, ENOUGH, SIZES, fitting
from tests.server.journal.journals import START, put, row


def over_time(database: Database, filters: Filters = Filters(), bucket: int | None = None) -> dict[str, Any]:  # noqa: B008
    with database.engine.connect() as connection:
        found: dict[str, Any] = summarise(connection, filters, bucket)["by_time"]
    return found


@pytest.mark.parametrize(
    ("span", "size"),
    [
        (-5, 60), (0, 60), (900, 60), (3600, 60), (6 * 3600, 300), (DAY, 900), (7 * DAY, 7200), (30 * DAY, 28_800),
        (100 * DAY, DAY), (100 * DAY + 1, 2 * DAY), (4e9, 463 * DAY),
    ],
)  # fmt: skip
def test_a_time_has_periods_that_fit(span: float, size: int) -> None:
    assert fitting(span) == size
    assert span <= ENOUGH * size
    smaller = [one for one in SIZES if one < size] if size <= DAY else [size - DAY]
    assert all(span > ENOUGH * one for one in smaller)


def test_periods_begin_at_full_minutes_in_every_database(database: Database) -> None:
    seconds = (0.0, 29.5, 30.0, 59.999, 60.0, 119.9, 125.0, 3599.999, 3600.0)
    put(database, *(row(i, created=START + second) for i, second in enumerate(seconds)))
    found = over_time(database, bucket=60)
    assert found["bucket"] == 60
    starts = [(one["start"] - START, one["count"]) for one in found["rows"]]
    assert starts == [(0, 4), (60, 2), (120, 1), (3540, 1), (3600, 1)]
    found = over_time(database, bucket=300)
    assert [(one["start"] - START, one["count"]) for one in found["rows"]] == [(0, 7), (3300, 1), (3600, 1)]


def test_the_period_follows_the_time_that_is_asked_for(database: Database) -> None:
    put(database, row(0), row(1, created=START + 7000))
    for until, size in ((900, 60), (6 * 3600, 300), (DAY, 900), (30 * DAY, 28_800)):
        assert over_time(database, Filters(since=START, until=START + until))["bucket"] == size
    assert over_time(database, Filters(until=START + 7001))["bucket"] == 120  # from the oldest row on
    assert over_time(database, Filters(model="none"))["bucket"] == 60


def test_each_period_has_its_numbers(database: Database) -> None:
    generator = random.Random(1)
    totals = {0: [generator.random() for _ in range(37)], 300: [2.0], 600: [1.0, 4.0], 1200: list(range(11))}
    rows = [
        row(0, created=START + start + 3 * i, total=total, first_token=None if i % 2 else total / 2)
        for start, all_of in totals.items()
        for i, total in enumerate(all_of)
    ]
    rows[0] |= {"attention_ratio": 0.2, "perceptual_blindness": True}
    rows[1] |= {"attention_ratio": 0.6, "dissociation": True, "readouts": dumps({"odd": True, "norm": 1.5})}
    rows[2] |= {"readouts": dumps({"odd": False})}
    put(database, *rows)
    broken = ("error", "cancelled", "shutdown")  # count, and have no part in the times
    put(database, *(row(i, total=90.0, first_token=80.0, finish_reason=reason) for i, reason in enumerate(broken)))
    found = over_time(database, bucket=300)["rows"]
    assert [one["start"] - START for one in found] == list(totals)
    for one, all_of in zip(found, totals.values(), strict=True):
        for name, values in (("total", all_of), ("first_token", [value / 2 for value in all_of[::2]])):
            tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
            assert one[name] == pytest.approx({"p50": statistics.median(values), "p90": tenths[8]}), (one, name)
    first, second, *_ = found
    assert (first["count"], first["errors"], first["cancelled"]) == (40, 2, 1)
    assert (first["attention_ratio"], first["focus_share"]) == (pytest.approx(0.4), None)
    assert first["flags"] == {"perceptual_blindness": 1, "dissociation": 1, "odd": 1}
    assert second["flags"] == {"perceptual_blindness": 0, "dissociation": 0}


def test_a_period_without_a_first_token_says_so(database: Database) -> None:
    put(database, row(0, first_token=None))
    (one,) = over_time(database, bucket=60)["rows"]
    assert one["first_token"] == {"p50": None, "p90": None}
    assert one["total"] == {"p50": 0.2, "p90": 0.2}


def test_of_very_many_periods_the_newest_are_told(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.journal.summary.periods.MOST", 3)
    put(database, *(row(i, created=START + 60 * i, total=float(i)) for i in range(6)))
    found = over_time(database, bucket=60)["rows"]
    assert [(one["start"] - START, one["total"]["p50"]) for one in found] == [(180, 3.0), (240, 4.0), (300, 5.0)]
