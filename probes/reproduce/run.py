"""A reproduction: the runs that its items need, and the outcome of each item."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probes.reproduce.items import (
    ABSENT,
    APPEARS,
    IMPOSSIBLE,
    NOTHING,
    Item,
    Json,
    Outcome,
    Paper,
    UnreadableRun,
)
from probes.reproduce.ivm import ITEMS as IVM
from probes.reproduce.mp import ITEMS as MP
from probes.reproduce.parallel import beside
from probes.reproduce.runs import RUNS
from probes.reproduce.sap import ITEMS as SAP
from probes.reproduce.spd import ITEMS as SPD
from probes.reproduce.spd_mechanism import MECHANISM
from steering.errors import SteeringError

ITEMS: Sequence[Item] = sorted((*MP, *IVM, *SAP, *SPD, *MECHANISM), key=lambda item: item.id)

FAILED = (ValueError, OSError, SteeringError)
"""Errors of a command that a user can correct."""


@dataclass(frozen=True)
class Done:
    """A run that ended: its command as a user would write it, its seconds, its report or the error, and its model.

    embedded: the model is one of those that the project trained.
    """

    command: str
    seconds: float
    report: Json | None
    error: str = ""
    model: str = ""
    embedded: bool = False


def reproduce(
    items: Iterable[Item],
    folder: Path,
    command: Callable[[Sequence[str]], Any],
    *,
    model: str | None,
    quick: bool,
    quiet: bool,
    jobs: int = 1,
    loading: Sequence[str] = (),
) -> tuple[list[Outcome], Mapping[str, Done]]:
    """Run what the items need and return their outcomes, and the runs by name.

    command: runs a command line of this program. jobs: the number of runs beside each other. loading: words of each command
    that say how the model is loaded. A run does not repeat what its
    folder already holds; one that fails leaves its items without figures, and the others continue.
    """
    items = list(items)
    runs = {item.run for item in items}
    if model is not None and any(RUNS[name].steers for name in runs if name is not None):
        runs.add("probe")
    names = [name for name in RUNS if name in runs]

    def run(name: str) -> Done:
        words = RUNS[name].command(name, folder, quick=quick, model=model, loading=loading)
        command_line = shlex.join(["helmsight", *words])
        if not quiet:
            print(command_line, file=sys.stderr, flush=True)
        done = _run_command(command, [*words, *(["--quiet"] if quiet or jobs > 1 else [])], folder / name, command_line)
        of_model = RUNS[name].model if model is None or RUNS[name].fixed else model
        return replace(done, model=of_model, embedded=of_model == RUNS[name].model)

    first = [name for name in names if name == "probe"]  # others may steer by its vector
    alone = [name for name in names if RUNS[name].timed]
    others_first = [name for name in names if name not in (*first, *alone)]
    results: dict[str, Done] = {}
    for name, result in beside([first, others_first, *([name] for name in alone)], run, jobs):
        results[name] = result
        if not quiet:
            ended = f"{name}: {result.error or f'{result.seconds:.0f} s'}"
            print(f"   {len(results)} of {len(names)} done, {ended}", file=sys.stderr, flush=True)
    results = {name: results[name] for name in names}
    return [outcome(item, results) for item in items], results


def _run_command(
    command: Callable[[Sequence[str]], Any], words: Sequence[str], folder: Path, command_line: str
) -> Done:
    started = time.monotonic()
    file = folder / "report.json"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command(words)
        report, error = json.loads(file.read_text()), ""
    except FAILED as reason:
        report, error = None, str(reason)
    return Done(command_line, time.monotonic() - started, report, error)


def outcome(item: Item, runs: Mapping[str, Done]) -> Outcome:
    """Return the outcome of an item; it says what the report lacks, if the item's reading fails."""
    if item.run is None or item.read is None:
        return Outcome(item, IMPOSSIBLE, why=item.why)
    ran = runs[item.run]
    if ran.report is None:
        return Outcome(item, IMPOSSIBLE, command=ran.command, why=f"the command failed: {ran.error}", model=ran.model)
    try:
        reading = item.read(ran.report)
    except (KeyError, IndexError, TypeError) as error:
        return Outcome(item, IMPOSSIBLE, command=ran.command, why=f"the report lacks {error}", model=ran.model)
    except UnreadableRun as error:
        return Outcome(item, IMPOSSIBLE, command=ran.command, why=str(error), model=ran.model)
    nothing = item.identity or reading.nothing or (item.embedded if ran.embedded else "")
    verdict = NOTHING if nothing else APPEARS if reading.appears else ABSENT
    return Outcome(item, verdict, reading, ran.command, nothing, ran.model)


def chosen(paper: Paper | None) -> list[Item]:
    """Return the items of a paper, or of all four."""
    return [item for item in ITEMS if paper in (None, item.paper)]
