"""Storage of measurements: HISTORY.md grows by a section a run, RESULTS.md is one table of its latest figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
COLUMNS = ("model", "what", "ratio", "min-max", "CPU time", "aim", "medians")
HEAD = """\
# Results

The latest figures of `benchmarks.run`, made of [HISTORY.md](HISTORY.md), which has medians, spreads and versions, and what
`benchmarks.versions` found. A ratio compares medians over repeats that alternate between both sides; the machines were not
quiet, see their load. A GPU's figures are in [GPU.md](GPU.md).
"""


@dataclass(frozen=True)
class Row:
    """A line of a table.

    `spread` is the least and greatest ratio of a single repeat, `aim` reads '>= 8', '<= 1.05' or '-' where there is none.
    """

    title: str
    ratio: float
    spread: tuple[float, float] | None
    cpu: float | None
    aim: str
    detail: str


@dataclass(frozen=True)
class Figure:
    """The latest figure of a model and a measurement."""

    model: str
    what: str
    ratio: float
    aim: str
    command: str
    machine: str
    date: str

    @property
    def missed(self) -> bool:
        if self.aim == "-":
            return False
        sign, limit = self.aim.split()
        return self.ratio < float(limit) if sign == ">=" else self.ratio > float(limit)


def as_table(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the rows by model as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for model, row in rows:
        spread = f"{row.spread[0]:.2f}-{row.spread[1]:.2f}" if row.spread else "-"
        cpu = f"{row.cpu:.3f}" if row.cpu is not None else "-"
        lines.append(f"| {model} | {row.title} | **{row.ratio:.3f}** | {spread} | {cpu} | {row.aim} | {row.detail} |")
    return "\n".join(lines)


def keep(table: str, *, date: str, machine: str, versions: str, command: str, folder: Path = FOLDER) -> None:
    """Append a run's table to the history, and rewrite the results."""
    history = folder / "HISTORY.md"
    section = f"\n## {date}\n\n{machine}; {versions}\n\n`{command}`\n\n{table}\n"
    text = history.read_text(encoding="utf-8") + section
    history.write_text(text, encoding="utf-8")
    (folder / "RESULTS.md").write_text(page(latest(text)), encoding="utf-8")


def latest(history: str) -> list[Figure]:
    """Return the last figure of every model and measurement, in the order of their first appearance."""
    found: dict[tuple[str, str], Figure] = {}
    date = machine = command = ""
    for line in history.splitlines():
        if line.startswith("## "):
            date, machine, command = line[3:].strip(), "", ""
        elif line.startswith("`python -m benchmarks.run"):
            command = line.split("`")[1]
        elif date and line and not machine:
            machine = line.split(";")[0]
        elif figure := _figure(line, date, machine, command):
            found[figure.model, figure.what] = figure
    return list(found.values())


def _figure(line: str, date: str, machine: str, command: str) -> Figure | None:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) != len(COLUMNS) or not (ratio := re.fullmatch(r"\*\*([\d.]+)\*\*", cells[2])):
        return None
    return Figure(cells[0], cells[1], float(ratio[1]), cells[5], command, machine, date)


def page(figures: Iterable[Figure]) -> str:
    """Return one table of the figures, with those that miss their aim marked."""
    figures = sorted(figures, key=lambda one: one.model)
    aimed = [one for one in figures if one.aim != "-"]
    missed = sum(one.missed for one in aimed)
    lines = [
        f"| {one.model} | {one.what} | {one.ratio:.3f} | {one.aim} | {_judged(one)} | `{one.command}` | {one.machine} | "
        f"{one.date} |"
        for one in figures
    ]
    head = "| model | what | ratio | aim | met | command | machine | date |\n|---|---|---:|---|---|---|---|---|"
    return f"{HEAD}\n{missed} of {len(aimed)} aims are missed.\n\n" + "\n".join([head, *lines]) + "\n"


def _judged(figure: Figure) -> str:
    if figure.aim == "-":
        return "-"
    return "**missed**" if figure.missed else "yes"
