"""Numbers made by hand for the report of `eval mc2`, and its tables read back."""

from __future__ import annotations

from typing import Any

import numpy as np

from probes.conflicts.samples import Side
from probes.conflicts.shares import Outcome, Shares
from probes.mc2.ablate import Knee, Steered
from probes.mc2.automatic import AutomaticReport, Cell, Ways
from probes.reporting.report import Report


def tables(page: Report) -> list[dict[str, dict[str, str]]]:
    """Every table as rows by their first cell, each with its cells by column."""
    tables_found: list[dict[str, dict[str, str]]] = []
    lines = page.markdown().replace("\u00a0", " ").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("| ---"):
            head = [cell.strip() for cell in lines[number - 1].strip("|").split("|")]
            rows = {}
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                cells = [cell.strip() for cell in row.strip("|").split("|")]
                rows[cells[0]] = dict(zip(head, cells, strict=True))
            tables_found.append(rows)
    return tables_found


def ranged(shares: Shares, name: str) -> str:
    """Return a share with its interval as a cell shows it."""
    low, high = shares.intervals[name]
    return f"{getattr(shares, name):.3f} ({low:.3f} to {high:.3f})"


def outcomes(vision: int, text: int, others: int) -> list[Outcome]:
    return [*["vision"] * vision, *["text"] * text, *["others"] * others]


def row(vision: tuple[int, int, int], text: tuple[int, int, int]) -> Steered:
    return Steered({"vision": Shares.of(outcomes(*vision), True), "text": Shares.of(outcomes(*text), True)})


def strengths(rows: dict[float, Steered], bend: Knee, published: float | None = None) -> dict[str, Any]:
    """Return the rows as report.json holds them."""
    return {
        "knee": bend.to_json(), "published": published,
        "rows": {f"{strength:g}": row.to_json() for strength, row in rows.items()},
    }  # fmt: skip


def a_cell(side: Side, severity: float, reworded: bool, auto: list[float], toward: str) -> Cell:
    """Ten samples: five right plainly, all of them where the side is known."""
    ways: dict[str, Side | None] = {"v": "vision", "t": "text", "-": None}
    return Cell(
        side, severity, reworded, np.array([1.0, 0.0] * 5), np.ones(10), ((side, None),) * 10,
        {"drop": Ways(np.array(auto), (tuple(ways[way] for way in toward),) * 10)}, 0.95, 0.45,
    )  # fmt: skip


def an_automatic(toward: str) -> AutomaticReport:
    half = [1.0, 0.0] * 5
    cells = [
        cell
        for severity, auto in ((0.3, half), (0.7, [1.0] * 10))
        for cell in (
            a_cell("vision", severity, False, auto, toward),
            a_cell("text", severity, False, half, toward),
            a_cell("text", severity, True, [0.0] * 10, toward),
        )
    ]
    return AutomaticReport(cells, ["color", "shape"] * 5)


AUTOMATIC = an_automatic("v-")
