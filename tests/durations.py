"""Measure what each file of tests costs: `python -m tests.durations [PATHS] [OPTIONS]` updates `tests/DURATIONS.md`.

Options are pytest's. CPU seconds are counted, not those of a clock, so that a busy machine tells the same as an idle one:
those of pytest's own process and of the processes that tests start. Rows of files that are not run stay as they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "DURATIONS.md"
RECORDS = "DURATIONS_OF_TESTS"  # the folder in which each process writes what it measured
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
ORPHANS = "tests"
"""The row of processes that outlived their parents, or ended with the session, as the browser does."""
ROW = re.compile(r"^\| (tests\S*) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


@dataclass
class Cost:
    """The cost of a file: its tests, CPU seconds in all, and those of them in processes that it started."""

    tests: int = 0
    seconds: float = 0.0
    children: float = 0.0


def _cpu_seconds() -> tuple[float, float]:
    own, children = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


class Recorder:
    """A plugin of pytest that writes a line for each test and each file's collection."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"{os.getpid()}.jsonl").open("a")

    def _write(
        self, name: str, tests: int, before: tuple[float, float], clock: float, whose: str | None = None
    ) -> None:
        """Write what this process and those that have ended took; `whose` these were, or what they were started by."""
        own, children = (after - earlier for after, earlier in zip(_cpu_seconds(), before, strict=True))
        record = {"tests": tests, "own": own, "wall": time.perf_counter() - clock}
        for test, more in ((name, {**record, "children": 0.0}), (whose or name, {"children": children})):
            print(json.dumps({"test": test, "tests": 0, "own": 0.0, "wall": 0.0, **more}), file=self.file, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        before, clock = _cpu_seconds(), time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self._write(collector.nodeid, 0, before, clock)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        before, clock = _cpu_seconds(), time.perf_counter()
        result = yield
        self._write(item.nodeid, 1, before, clock, whose=item.nodeid if nextitem else ORPHANS)
        return result


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(RECORDS):
        config.pluginmanager.register(Recorder(Path(folder)))


def read_records(folder: Path) -> dict[str, Cost]:
    costs: dict[str, Cost] = defaultdict(Cost)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            cost = costs[record["test"].partition("::")[0]]
            cost.tests += record["tests"]
            cost.seconds += record["own"] + record["children"]
            cost.children += record["children"]
    return {file: cost for file, cost in costs.items() if cost.tests or file == ORPHANS}


def read_table(text: str) -> dict[str, Cost]:
    return {
        file: Cost(int(tests), float(seconds), float(children)) for file, tests, seconds, children in ROW.findall(text)
    }


def write_table(costs: dict[str, Cost]) -> str:
    total = sum(cost.seconds for cost in costs.values())
    lines = [
        "# What the tests cost",
        "",
        f"{total:,.0f} CPU seconds for {sum(cost.tests for cost in costs.values()):,} tests, made by "
        "`python -m tests.durations [PATHS]`. The file that is the first to need a library pays for its import. The row",
        "`tests` is of processes that outlived their parents or ended with the session: above all the browser.",
        "",
        "| file | tests | CPU seconds | of them in child processes |",
        "|---|---|---|---|",
    ]
    for file, cost in sorted(costs.items(), key=lambda pair: (-pair[1].seconds, pair[0])):
        lines.append(f"| {file} | {cost.tests} | {cost.seconds:.1f} | {cost.children:.1f} |")
    return "\n".join(lines) + "\n"


def run_adopting(command: list[str], folder: Path) -> int:
    """Run a command, count what processes cost that outlive their parents, and return the command's exit status."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    pytest_pid = os.posix_spawn(command[0], command, os.environ)
    with (folder / "orphans.jsonl").open("a") as file:
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == pytest_pid:
                return os.waitstatus_to_exitcode(status)
            seconds = usage.ru_utime + usage.ru_stime
            print(
                json.dumps({"test": ORPHANS, "tests": 0, "own": 0.0, "children": seconds, "wall": 0.0}),
                file=file,
                flush=True,
            )


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.environ.setdefault(RECORDS, made))
        status = run_adopting([sys.executable, "-m", "pytest", "-p", "tests.durations", *sys.argv[1:]], folder)
        known = read_table(TABLE.read_text()) if TABLE.exists() else {}
        measured = read_records(folder)
        if any((ROOT / word.partition("::")[0]).exists() for word in sys.argv[1:]):
            measured.pop(ORPHANS, None)  # of some files: the row is of all
        costs = {file: cost for file, cost in {**known, **measured}.items() if (ROOT / file).exists()}
    TABLE.write_text(write_table(costs))
    return status


if __name__ == "__main__":
    sys.exit(main())
