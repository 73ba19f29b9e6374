"""What the rows say together. The database does the counting: a large journal must neither fill memory nor hold the
interpreter's lock while answers are being generated."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, MetaData, Table, and_, case, func, insert, select

from server.journal.queries import Filters
from server.journal.schema import FLAGS, ROWS

SAMPLE = 100_000
"""Rows, the newest that match, that everything but `count` is computed from."""
HOURS = 1000
VALUES = (
    "attention_ratio", "focus_share", "decay_slope", "kl", "dose", "first_token", "total", "completion_tokens",
)  # fmt: skip
MEANS = ("attention_ratio", "focus_share", "decay_slope")
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}

NEEDED = (*VALUES, *FLAGS, "hour", "finish_reason", "intervention", "correct", "answer_correct")
SAMPLED = Table(
    "helmsight_journal_sample",
    MetaData(),
    *(Column(name, ROWS.c[name].type) for name in NEEDED),
    prefixes=["TEMPORARY"],
)
"""What the statistics need of the rows that they are about, copied once: a scan of the journal itself is long."""

of = SAMPLED.c


def summarise(connection: Connection, filters: Filters, sample: int = SAMPLE) -> dict[str, Any]:
    """The `diagnostics.summary` of the matching rows; `sampled` says how many of the newest it is computed from."""
    SAMPLED.create(connection, checkfirst=False)
    newest = select(*(ROWS.c[name] for name in NEEDED)).where(filters.where())
    newest = newest.order_by(ROWS.c.key.desc()).limit(sample)
    connection.execute(insert(SAMPLED).from_select(NEEDED, newest))
    sampled = count = connection.execute(select(func.count()).select_from(SAMPLED)).scalar_one()
    if sampled == sample:
        count = connection.execute(select(func.count()).select_from(ROWS).where(filters.where())).scalar_one()
    reasons = connection.execute(select(of.finish_reason, func.count()).group_by(of.finish_reason))
    found = {
        "object": "diagnostics.summary",
        "since": filters.since,
        "until": filters.until,
        "count": count,
        "sampled": sampled,
        "finish_reasons": dict(sorted(tuple(found) for found in reasons)),
        "values": _values(connection),
        **_rates(connection),
        "by_intervention": _by_intervention(connection),
        "by_hour": _by_hour(connection),
    }
    SAMPLED.drop(connection, checkfirst=False)
    return found


def _values(connection: Connection) -> dict[str, dict[str, Any]]:
    """Count, mean, extremes and quantiles (interpolated linearly between ranks) of every value."""
    moments = [f(of[name]) for name in VALUES for f in (func.count, func.avg, func.min, func.max)]
    found = connection.execute(select(*moments)).one()
    out = {}
    for i, name in enumerate(VALUES):
        count, mean, low, high = found[4 * i : 4 * i + 4]
        quantiles = _quantiles(connection, name, count)
        out[name] = {"count": count, "mean": _float(mean), "min": _float(low), **quantiles, "max": _float(high)}
    return out


def _quantiles(connection: Connection, name: str, count: int) -> dict[str, float | None]:
    if not count:
        return dict.fromkeys(QUANTILES)
    positions = {label: q * (count - 1) for label, q in QUANTILES.items()}
    ranks = {int(position) + step for position in positions.values() for step in (0, 1)}
    value = of[name]
    rank = func.row_number().over(order_by=value)
    ranked = select(value.label("value"), rank.label("rank")).where(value.is_not(None)).subquery()
    chosen = select(ranked.c.rank, ranked.c.value).where(ranked.c.rank.in_([r + 1 for r in ranks]))
    at = {found_rank - 1: float(found) for found_rank, found in connection.execute(chosen)}
    out: dict[str, float | None] = {}
    for label, position in positions.items():
        low = int(position)
        high = min(low + 1, count - 1)
        out[label] = at[low] + (position - low) * (at[high] - at[low])
    return out


def _rates(connection: Connection) -> dict[str, Any]:
    flags = [column for name in FLAGS for column in (func.count(of[name]), _times(of[name].is_(True)))]
    right = and_(of.answer_correct.is_(True), of.correct.is_not(None))
    found = connection.execute(
        select(
            *flags,
            func.count(of.correct),
            _times(of.correct.is_(True)),
            _times(right),
            _times(and_(right, of.correct.is_(False))),
        )
    ).one()
    known, correct, judged, implicit = found[-4:]
    return {
        "flags": {name: {"known": found[2 * i], "raised": found[2 * i + 1]} for i, name in enumerate(FLAGS)},
        "focus": {"known": known, "correct": correct, "accuracy": _share(correct, known)},
        "ivm": {"known": judged, "implicit": implicit, "rate": _share(implicit, judged)},
    }


def _by_intervention(connection: Connection) -> list[dict[str, Any]]:
    means = [func.avg(of[name]).label(name) for name in MEANS]
    counts = [
        func.count().label("n"),
        func.count(of.correct).label("known"),
        _times(of.correct.is_(True)).label("hits"),
    ]
    grouped = select(of.intervention, *counts, *means).group_by(of.intervention)
    return [
        {
            "intervention": found["intervention"],
            "count": found["n"],
            **{name: _float(found[name]) for name in MEANS},
            "accuracy": _share(found["hits"], found["known"]),
        }
        for found in sorted(connection.execute(grouped).mappings(), key=lambda f: (-f["n"], f["intervention"]))
    ]


def _by_hour(connection: Connection) -> list[dict[str, Any]]:
    """The newest HOURS hours that have rows, oldest first."""
    means = [func.avg(of[name]).label(name) for name in MEANS]
    raised = [_times(of[name].is_(True)).label(name) for name in FLAGS]
    grouped = select(of.hour, func.count().label("n"), *means, *raised).group_by(of.hour)
    found = connection.execute(grouped.order_by(of.hour.desc()).limit(HOURS)).mappings().all()
    return [
        {
            "start": hour["hour"] * 3600,
            "count": hour["n"],
            **{name: _float(hour[name]) for name in MEANS},
            **{name: hour[name] for name in FLAGS},
        }
        for hour in reversed(found)
    ]


def _times(condition: ColumnElement[bool]) -> ColumnElement[int]:
    """How many rows meet a condition."""
    return func.count(case((condition, 1)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
