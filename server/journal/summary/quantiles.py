"""Quantiles, interpolated linearly between ranks.

PostgreSQL has a function for them. In SQLite the values are sorted into a table and looked up by rank, since its window
functions take about twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Double,
    Integer,
    MetaData,
    Table,
    and_,
    func,
    insert,
    literal,
    null,
    select,
)

SORTED = Table(
    "helmsight_journal_sorted",
    MetaData(),
    Column("place", Integer, primary_key=True),
    Column("value", Double),
    prefixes=["TEMPORARY"],
)
"""Values in order, from place 1 on."""


def quantiles(
    connection: Connection,
    value: ColumnElement[Any],
    shares: Mapping[str, float],
    counts: Mapping[Any, int],
    by: ColumnElement[Any] | None = None,
) -> dict[Any, dict[str, float]]:
    """Return the quantiles of each group that has values, under the names of `shares`.

    `counts` gives the number of values of every group, in ascending order of `by` and up to the last group; without `by` all
    belong to the group None.
    """
    counts = {group: count for group, count in counts.items() if count}
    if not counts:
        return {}
    has_value = value.is_not(None) if by is None else and_(value.is_not(None), by >= next(iter(counts)))
    if connection.dialect.name != "sqlite":
        spread = func.percentile_cont(literal(list(shares.values()), ARRAY(Double))).within_group(value)
        grouped = select(null(), spread) if by is None else select(by, spread).group_by(by)
        return {group: dict(zip(shares, at, strict=True)) for group, at in connection.execute(grouped.where(has_value))}

    SORTED.create(connection, checkfirst=False)
    order = [value] if by is None else [by, value]
    connection.execute(insert(SORTED).from_select(("value",), select(value).where(has_value).order_by(*order)))
    ranks: dict[tuple[Any, str], tuple[int, int, float]] = {}
    before = 1
    for group, count in counts.items():
        for name, share in shares.items():
            rank = share * (count - 1)
            low = int(rank)
            ranks[group, name] = before + low, before + min(low + 1, count - 1), rank - low
        before += count
    places = {place for low, high, _ in ranks.values() for place in (low, high)}
    at: dict[int, float] = dict(connection.execute(select(*SORTED.c).where(SORTED.c.place.in_(places))).all())
    SORTED.drop(connection, checkfirst=False)
    spreads: dict[Any, dict[str, float]] = {group: {} for group in counts}
    for (group, name), (low, high, part) in ranks.items():
        spreads[group][name] = at[low] + part * (at[high] - at[low])
    return spreads
