"""The measured figures, a row each, and the page that shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = ("section", "what", "value", "unit", "note")


class Unavailable(Exception):
    """A figure cannot be measured here; the message says why in a sentence."""


@dataclass(frozen=True)
class Gauge:
    """A figure of a section; where `value` is None, `note` says why."""

    section: str
    what: str
    value: float | str | None
    unit: str = ""
    note: str = ""


def as_page(machine: Mapping[str, Any], rows: Sequence[Gauge]) -> str:
    """Return the rows as a Markdown table below the facts of the machine."""
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    head = f"| {' | '.join(COLUMNS)} |\n|---|---|---:|---|---|"
    lines = "\n".join(f"| {' | '.join(_cells(row))} |" for row in rows)
    return f"# helmsight bench\n\n{facts}\n\n{head}\n{lines}\n"


def as_json(machine: Mapping[str, Any], rows: Iterable[Gauge]) -> str:
    """Return the rows and the machine as JSON."""
    return json.dumps({"machine": dict(machine), "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def _cells(row: Gauge) -> Iterable[str]:
    value = "-" if row.value is None else row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
    return (cell.replace("|", "/").replace("\n", " ") for cell in (row.section, row.what, value, row.unit, row.note))
