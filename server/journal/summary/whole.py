"""The summary of the journal, computed by the database.

Thus a large journal neither fills memory nor holds the interpreter's lock while answers are generated.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, select

from server.journal.reading.queries import Filters
from server.journal.refusals import refusals
from server.journal.schema import FLAGS, ROWS
from server.journal.summary.periods import by_time, size_for
from server.journal.summary.quantiles import quantiles
from server.journal.summary.sample import MEANS, MORE, SAMPLED, VALUES, real, sampled, times
from server.journal.words import LIVE

SAMPLE = 100_000
"""Number of the newest matching rows from which everything but `count` is computed."""
HOURS = 1000
QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}

of, more = SAMPLED.c, MORE.c


def summarise(
    connection: Connection, filters: Filters, bucket: int | None = None, sample: int = SAMPLE
) -> dict[str, Any]:
    """Return the `diagnostics.summary` of the matching rows; `sampled` is the number of rows it is computed from.

    `bucket` is the period of `by_time` in seconds, a multiple of 60; by default it suits the time span.
    """
    with sampled(connection, filters, sample) as sample_size:
        size = bucket or size_for(connection, filters)
        count = sample_size
        if sample_size == sample:
            count = connection.execute(select(func.count()).select_from(ROWS).where(filters.where())).scalar_one()
        reasons = connection.execute(select(of.finish_reason, func.count()).group_by(of.finish_reason))
        source = func.coalesce(of.source, LIVE)
        sources = connection.execute(select(source, func.count()).group_by(source))
        guards = connection.execute(select(of.guard, func.count()).where(of.guard.is_not(None)).group_by(of.guard))
        return {
            "object": "diagnostics.summary",
            "since": filters.since,
            "until": filters.until,
            "count": count,
            "sampled": sample_size,
            "finish_reasons": dict(sorted(tuple(row) for row in reasons)),
            "sources": dict(sorted(tuple(row) for row in sources)),
            "guards": dict(sorted(tuple(row) for row in guards)),
            "values": _values(connection),
            **_rates(connection),
            "by_intervention": _by_intervention(connection),
            "by_hour": _by_hour(connection),
            "by_time": by_time(connection, size),
            "refusals": refusals(connection, filters, size),
        }


def _values(connection: Connection) -> dict[str, dict[str, Any]]:
    """Return count, mean, extremes and quantiles (interpolated linearly between ranks) of every value.

    Times and tokens are those of answers that ran to their end.
    """
    row = connection.execute(select(*(moment for name in VALUES for moment in _moments(of[name])))).one()
    out = {}
    for name, count, mean in zip(VALUES, row[::2], row[1::2], strict=True):
        spread = quantiles(connection, of[name], QUANTILES, {None: count})
        out[name] = _spread(count, mean, spread.get(None))
    others = select(more.name, *_moments(more.value)).where(more.value.is_not(None)).group_by(more.name)
    rows = connection.execute(others.order_by(more.name)).all()
    spreads = quantiles(connection, more.value, QUANTILES, {name: count for name, count, _ in rows}, by=more.name)
    return out | {name: _spread(count, mean, spreads[name]) for name, count, mean in rows}


def _moments(value: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    return [func.count(value), func.avg(value)]


def _spread(count: int, mean: Any, spread: dict[str, float] | None) -> dict[str, Any]:
    return {"count": count, "mean": real(mean), **(spread or dict.fromkeys(QUANTILES))}


def _rates(connection: Connection) -> dict[str, Any]:
    flags = [column for name in FLAGS for column in (func.count(of[name]), times(of[name].is_(True)))]
    right = and_(of.answer_correct.is_(True), of.correct.is_not(None))
    row = connection.execute(
        select(
            *flags,
            func.count(of.correct),
            times(of.correct.is_(True)),
            times(right),
            times(and_(right, of.correct.is_(False))),
        )
    ).one()
    focus_known, correct, judged, implicit = row[-4:]
    counted = {name: {"known": row[2 * i], "raised": row[2 * i + 1]} for i, name in enumerate(FLAGS)}
    others = select(more.name, func.count(), times(more.truth.is_(True))).where(more.truth.is_not(None))
    for name, times_known, raised in connection.execute(others.group_by(more.name).order_by(more.name)):
        counted[name] = {"known": times_known, "raised": raised}
    return {
        "flags": counted,
        "focus": {"known": focus_known, "correct": correct, "accuracy": _share(correct, focus_known)},
        "ivm": {"known": judged, "implicit": implicit, "rate": _share(implicit, judged)},
    }


def _by_intervention(connection: Connection) -> list[dict[str, Any]]:
    means = [func.avg(of[name]).label(name) for name in MEANS]
    counts = [
        func.count().label("n"),
        func.count(of.correct).label("known"),
        times(of.correct.is_(True)).label("hits"),
    ]
    grouped = select(of.intervention, *counts, *means).group_by(of.intervention)
    return [
        {
            "intervention": row["intervention"],
            "count": row["n"],
            **{name: real(row[name]) for name in MEANS},
            "accuracy": _share(row["hits"], row["known"]),
        }
        for row in sorted(connection.execute(grouped).mappings(), key=lambda f: (-f["n"], f["intervention"]))
    ]


def _by_hour(connection: Connection) -> list[dict[str, Any]]:
    """Return the newest HOURS hours that have rows, oldest first."""
    means = [func.avg(of[name]).label(name) for name in MEANS]
    raised = [times(of[name].is_(True)).label(name) for name in FLAGS]
    grouped = select(of.hour, func.count().label("n"), *means, *raised).group_by(of.hour)
    hours = connection.execute(grouped.order_by(of.hour.desc()).limit(HOURS)).mappings().all()
    return [
        {
            "start": hour["hour"] * 3600,
            "count": hour["n"],
            **{name: real(hour[name]) for name in MEANS},
            **{name: hour[name] for name in FLAGS},
        }
        for hour in reversed(hours)
    ]


def _share(part: int, total: int) -> float | None:
    return part / total if total else None
