"""The sampled rows over time: counts, means, rates and times of answers, period by period."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from server.journal.reading.queries import Filters
from server.journal.schema import FLAGS
from server.journal.summary.quantiles import quantiles
from server.journal.summary.sample import MEANS, MORE, SAMPLED, real, times
from server.journal.words import UNFINISHED

MINUTE = 60
DAY = 86_400
MOST = 1000
"""Number of periods that are returned, the newest ones."""
SIZES = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, DAY)
ENOUGH = 100
"""Number of periods that fit on a chart."""
LATENCIES = ("first_token", "total")
QUANTILES = {"p50": 0.5, "p90": 0.9}

of, more = SAMPLED.c, MORE.c


def fitting(span: float) -> int:
    """Return a suitable period in seconds for a time span: a round number, and whole days from a day on."""
    return next((size for size in SIZES if span <= ENOUGH * size), DAY * (int(span / (ENOUGH * DAY)) + 1))


def size_for(connection: Connection, filters: Filters) -> int:
    """Return the suitable period for the filters' time span, which defaults to that from the oldest row until now."""
    end = time.time() if filters.until is None else filters.until
    start = filters.since
    if start is None:
        oldest = connection.execute(select(func.min(of.minute))).scalar_one()
        start = end if oldest is None else oldest * MINUTE
    return fitting(end - start)


def by_time(connection: Connection, size: int) -> dict[str, Any]:
    """Return the newest MOST periods of `size` seconds, a multiple of MINUTE, that have rows, oldest first."""
    period = of.minute // (size // MINUTE)
    means = [func.avg(of[name]).label(name) for name in MEANS]
    raised = [times(of[name].is_(True)).label(name) for name in FLAGS]
    ends = [times(of.finish_reason == reason).label(reason) for reason in UNFINISHED]
    timed = [func.count(of[name]).label(name) for name in LATENCIES]
    grouped = select(period.label("period"), func.count().label("n"), *means, *raised, *ends, *timed).group_by(period)
    records = connection.execute(grouped.order_by(period.desc()).limit(MOST)).mappings().all()[::-1]
    others = _others(connection, more.minute // (size // MINUTE))
    latencies = {}
    for name in LATENCIES:
        counts = {record["period"]: record[name] for record in records}
        latencies[name] = quantiles(connection, of[name], QUANTILES, counts, by=period)
    rows = [
        {
            "start": record["period"] * size,
            "count": record["n"],
            "errors": record["error"] + record["shutdown"],
            "cancelled": record["cancelled"],
            **{name: real(record[name]) for name in MEANS},
            "flags": {name: record[name] for name in FLAGS} | others[record["period"]],
            **{name: dict.fromkeys(QUANTILES) | latencies[name].get(record["period"], {}) for name in LATENCIES},
        }
        for record in records
    ]
    return {"bucket": size, "rows": rows}


def _others(connection: Connection, period: ColumnElement[int]) -> dict[int, dict[str, int]]:
    """Return how often flags without a column were raised, by period."""
    raised = select(period, more.name, times(more.truth.is_(True))).where(more.truth.is_not(None))
    counts: dict[int, dict[str, int]] = defaultdict(dict)
    for at, name, count in connection.execute(raised.group_by(period, more.name).order_by(more.name)):
        counts[at][name] = count
    return counts
