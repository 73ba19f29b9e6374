"""What was measured, a row each, and the page that shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = ("section", "what", "value", "unit", "note")


class Unavailable(Exception):
    """Says, as a sentence, why something cannot be measured here."""


@dataclass(frozen=True)
class Gauge:
    """One figure of a section; `value` is None where there is none, and then `note` says why."""

    section: str
    what: str
    value: float | str | None
    unit: str = ""
    note: str = ""


def as_page(machine: Mapping[str, Any], rows: Sequence[Gauge]) -> str:
    """The rows as a Markdown table below what they were measured on."""
    facts = "\n".join(f"- {name}: {said}" for name, said in machine.items())
    head = f"| {' | '.join(COLUMNS)} |\n|---|---|---:|---|---|"
    lines = "\n".join(f"| {' | '.join(_cells(row))} |" for row in rows)
    return f"# helmsight bench\n\n{facts}\n\n{head}\n{lines}\n"


def as_json(machine: Mapping[str, Any], rows: Iterable[Gauge]) -> str:
    """The same for programs."""
    return json.dumps({"machine": dict(machine), "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def _cells(row: Gauge) -> Iterable[str]:
    value = "-" if row.value is None else row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
    return (cell.replace("|", "/").replace("\n", " ") for cell in (row.section, row.what, value, row.unit, row.note))
