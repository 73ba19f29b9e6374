"""Measured rows against their targets, and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measured number; `target` reads '>= 0.97', '<= 0.02', '0.25..0.75' or '' where there is none."""

    group: str
    name: str
    value: float
    target: str
    n: int

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        if ".." in self.target:
            low, high = map(float, self.target.split(".."))
            return low <= self.value <= high
        sign, limit = self.target.split()
        return self.value >= float(limit) if sign == ">=" else self.value <= float(limit)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, group by group."""
    lines = ["| group | what | measured | target | met | n |", "| --- | --- | --- | --- | --- | --- |"]
    for group in dict.fromkeys(row.group for row in rows):
        for row in (row for row in rows if row.group == group):
            met = {True: "yes", False: "**no**", None: ""}[row.met]
            lines.append(f"| {row.group} | {row.name} | {row.value:.3f} | {row.target} | {met} | {row.n} |")
    return "\n".join(lines) + "\n"


def report(rows: Sequence[Row], title: str) -> str:
    """Return a Markdown page that states how many targets were met."""
    aimed = [row for row in rows if row.met is not None]
    met = sum(bool(row.met) for row in aimed)
    return f"# {title}\n\n{met} of {len(aimed)} targets met.\n\n{table(rows)}"
