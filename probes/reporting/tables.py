"""Tables of results, with one way to write a cell: Markdown in a report, aligned columns in a terminal."""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; columns of numbers are aligned right.

    A float has 3 decimals, None is "-", a bool yes or no. Raises ValueError for a row that does not have one cell per
    column.
    """
    rows = _check(columns, rows)
    rules = ["---:" if numeric else "---" for numeric in _numeric(columns, rows)]
    lines = [list(map(_escape, columns)), rules, *(list(map(_escape, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Summary:
    """A table for the terminal, with a line between its sections; cells are as in `markdown`."""

    title: str
    columns: Sequence[str]
    sections: Sequence[Sequence[Sequence[object]]]

    def show(self) -> None:
        """Print the table, wide enough to be readable if the output is not a terminal."""
        rows = _check(self.columns, [row for section in self.sections for row in section])
        table = Table(title=Text(self.title), title_justify="left")
        for name, numeric in zip(self.columns, _numeric(self.columns, rows), strict=True):
            table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
        for section in self.sections:
            table.add_section()
            for row in section:
                table.add_row(*(Text(_cell(value)) for value in row))
        Console(width=None if sys.stdout.isatty() else 120).print(table)


@dataclass(frozen=True)
class Measured:
    """A cell with a number, its 95 % interval and the p of a test; `signed` if it is a difference.

    The interval does not break, so that it stands below the number in a narrow column.
    """

    value: float | None
    interval: Sequence[float] | None = None
    p: float | None = None
    signed: bool = False

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        sign = "+" if self.signed else ""
        text = f"{self.value:{sign}z.3f}"
        if self.interval is not None:
            low, high = (f"{bound:{sign}z.3f}" for bound in self.interval)
            text += " (" + f"{low} to {high})".replace(" ", _TIED)
        if self.p is not None:
            text += ", " + (f"p {self.p:.3f}" if self.p >= 0.0005 else "p < 0.001").replace(" ", _TIED)
        return text


_TIED = "\u00a0"


def line(text: str) -> str:
    """Return the text on one line."""
    return " ".join(text.splitlines()).strip()


def _check(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[list[object]]:
    checked = [list(row) for row in rows]
    for row in checked:
        if len(row) != len(columns):
            raise ValueError(f"A row has {len(row)} cells, the table {len(columns)} columns: {row!r}.")
    return checked


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):z.3f}"
    return line(str(value))


def _escape(value: object) -> str:
    # Double the backslashes before a pipe, which would otherwise consume its escape.
    return re.sub(r"(\\*)\|", r"\1\1\\|", _cell(value))


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Return for each column whether it holds numbers only, and at least one."""
    alignments = []
    for index in range(len(columns)):
        present = [row[index] for row in rows if row[index] is not None]
        alignments.append(
            bool(present) and all(isinstance(o, numbers.Real | Measured) and not isinstance(o, bool) for o in present)
        )
    return alignments
