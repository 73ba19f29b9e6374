"""The fields of a row, which HTTP, JSON Lines, CSV, Parquet and SQL have under the same names, null where one is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import RowMapping

from server.encode import dumps
from server.journal.schema import ADDED, DIAGNOSTICS

SAMPLING: dict[str, type] = {
    "temperature": float, "top_p": float, "max_tokens": int, "seed": int, "n": int, "top_k": int, "min_p": float,
    "repetition_penalty": float, "frequency_penalty": float, "presence_penalty": float, "logprobs": int, "ignore_eos": bool,
    "min_tokens": int,
}  # fmt: skip
"""The sampling values of a row; from top_k on, null stands for the default."""
GROUPS = {
    "sampling": tuple(SAMPLING),
    "usage": ("prompt_tokens", "completion_tokens"),
    "latency": ("first_token", "total"),
    "texts": ("prompt", "answer"),
}
"""The objects of a row in JSON, besides `diagnostics`; tables have a column for each of their entries."""
ADDED_NAMES = tuple(column.name for columns in ADDED.values() for column in columns)
LISTS = ("interventions", "vectors", "digests")
"""Fields that are lists in JSON, and texts with spaces in tables."""
PLAIN = (
    "id", "choice", "created", "model", "key_name", *(name for name in ADDED_NAMES if name not in LISTS), "finish_reason",
    "streamed", "toward", "images",
)  # fmt: skip
"""The fields that are a column of the database, as it is."""
REPORTS = ("asked", "applied", "metadata")
"""Fields that are objects in JSON, and JSON in tables."""

FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""Characters that start a formula in some spreadsheet, or that it drops before one."""


def columns(scalars: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of a table, given the readouts' numbers that have no column of their own."""
    return (
        *PLAIN[:-2], *LISTS, *PLAIN[-2:], "answer_correct", *GROUPS["sampling"], *GROUPS["usage"], *GROUPS["latency"],
        *DIAGNOSTICS, *scalars, *REPORTS, *GROUPS["texts"],
    )  # fmt: skip


def shown(row: Mapping[str, Any] | RowMapping, scalars: Iterable[str]) -> dict[str, Any]:
    """Return a row of the database as a `diagnostics.row` of the API."""
    texts = {name: row[name] for name in GROUPS["texts"]}
    sampling = json.loads(row["sampling"])
    plain = {name: row[name] for name in PLAIN}
    return {
        "object": "diagnostics.row",
        **plain,
        **{name: _listed(row[name]) for name in LISTS},
        "answer_correct": row["answer_correct"],
        "asked": json.loads(row["asked"]),
        "applied": _parsed(row["applied"]),
        "sampling": {**dict.fromkeys(SAMPLING), **sampling},
        "usage": {name: row[name] for name in GROUPS["usage"]},
        "latency": {name: row[name] for name in GROUPS["latency"]},
        "diagnostics": {
            **{name: row[name] for name in DIAGNOSTICS},
            **dict.fromkeys(scalars),
            **(_parsed(row["readouts"]) or {}),
        },
        "metadata": _parsed(row["metadata"]),
        "texts": texts if any(text is not None for text in texts.values()) else None,
    }


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shown row for a table, with a column for each entry of its objects, and reports as JSON."""
    flattened = dict(row)
    for group in (*GROUPS, "diagnostics"):
        flattened |= flattened.pop(group) or dict.fromkeys(GROUPS.get(group, ()))
    flattened |= {name: None if row[name] is None else " ".join(row[name]) for name in LISTS}
    return flattened | {name: None if row[name] is None else dumps(row[name]) for name in REPORTS}


def cells(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a shown row for a spreadsheet, in which no text is a formula."""
    flattened = flat(row)
    return {name: inert(flattened.get(name)) for name in names}


def inert(value: Any) -> Any:
    """Return a cell that no spreadsheet reads as a formula; numbers may begin with a sign (OWASP, CSV injection)."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _listed(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return text.strip("|").split("|") if text != "|" else []


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)
