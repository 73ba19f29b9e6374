"""Storage of measurements: HISTORY.md grows by a section a run, RESULTS.md has the latest figures, a table for each run."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
COLUMNS = ("model", "what", "ratio", "min-max", "CPU time", "aim", "medians")
HEAD = """\
# Results

The latest figure of each comparison of `benchmarks.run`: a table for each run on a machine, newest first. A ratio compares
medians over repeats that alternate between both sides; the spread is from the least to the greatest ratio of one repeat.
The machines were not quiet: see their load. [HISTORY.md](HISTORY.md) has all runs, with medians, CPU time and versions, and
those of `benchmarks.versions`. [GPU.md](GPU.md) has the figures of GPUs, [SERVING.md](SERVING.md) those of servers.
"""
UNEXPLAINED = "not explained yet"


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
    spread: str
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


Reasons = Mapping[tuple[str, str, str], str]
"""Reasons why figures missed their aims, by model, measurement and date: a later figure needs a reason of its own."""


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
    (folder / "RESULTS.md").write_text(page(latest(text), reasons(folder)), encoding="utf-8")


def reasons(folder: Path = FOLDER) -> Reasons:
    """Return the reasons in `reasons.toml`, none where there is no such file."""
    file = folder / "reasons.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["missed"] if file.exists() else ()
    return {(entry["model"], entry["what"], entry["date"]): entry["why"] for entry in entries}


def latest(history: str) -> list[Figure]:
    """Return the last figure of every model and measurement, in the order of their first appearance."""
    figures: dict[tuple[str, str], Figure] = {}
    date = machine = command = ""
    for line in history.splitlines():
        if line.startswith("## "):
            date, machine, command = line[3:].strip(), "", ""
        elif line.startswith("`python -m benchmarks.run"):
            command = line.split("`")[1]
        elif date and line and not machine:
            machine = line.split(";")[0]
        elif figure := _figure(line, date, machine, command):
            figures[figure.model, figure.what] = figure
    return list(figures.values())


def _figure(line: str, date: str, machine: str, command: str) -> Figure | None:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) != len(COLUMNS) or not (ratio := re.fullmatch(r"\*\*([\d.]+)\*\*", cells[2])):
        return None
    return Figure(cells[0], cells[1], float(ratio[1]), cells[3], cells[5], command, machine, date)


def page(figures: Iterable[Figure], why: Reasons) -> str:
    """Return the figures as a table for each run, with the reason where an aim is missed."""
    figures = list(figures)
    aimed = [figure for figure in figures if figure.aim != "-"]
    runs: defaultdict[tuple[str, str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        runs[figure.date, figure.machine, figure.command].append(figure)
    parts = [HEAD, f"{sum(figure.missed for figure in aimed)} of {len(aimed)} aims are missed.\n"]
    for run in sorted(runs, reverse=True):
        parts += [_section(*run), _table(runs[run], why)]
    return "\n".join(parts)


def _section(date: str, machine: str, command: str) -> str:
    return f"## {date}\n\n{machine}; `{command}`\n"


def _table(figures: Iterable[Figure], why: Reasons) -> str:
    lines = ["| model | comparison | ratio | spread | aim | met | why missed |", "|---|---|---:|---|---|---|---|"]
    for figure in sorted(figures, key=lambda figure: figure.model):
        spread = re.sub(r"(?<=\d)-(?=\d)", " to ", figure.spread)
        met = "-" if figure.aim == "-" else "**no**" if figure.missed else "yes"
        reason = why.get((figure.model, figure.what, figure.date), UNEXPLAINED) if figure.missed else ""
        cells = (figure.model, figure.what, f"{figure.ratio:.3f}", spread, figure.aim, met, reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
