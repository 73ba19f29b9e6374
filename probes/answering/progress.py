"""Progress of long tasks: bars in a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

T = TypeVar("T")

FIRST, EVERY = 2.0, 5.0
"""Seconds until the first line, and between lines."""
MOST = 24
"""The most parts that get bars of their own."""


@dataclass
class Count:
    """The number of items done, out of `total`; the `kept` ones came from an earlier run and took no time."""

    total: int
    done: int = 0
    kept: int = 0

    def left(self, seconds: float) -> float | None:
        """Return the estimated seconds for the rest, from those spent on items not kept; None without such items."""
        fresh = self.done - self.kept
        return (self.total - self.done) * seconds / fresh if fresh else None

    def __str__(self) -> str:
        return f"{self.done}/{self.total}"


class Tracker:
    """A context manager that shows a count of `unit`, and one for each part if there are several.

    `parts`: the number of items in each. Nothing is shown if `quiet`. On a terminal these are bars with the remaining time;
    elsewhere it is a line at intervals for a task that takes longer than `FIRST` seconds, and one at its end.
    """

    def __init__(
        self,
        title: str,
        parts: Mapping[str, int],
        *,
        unit: str = "answers",
        quiet: bool = False,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title or unit.capitalize()
        self.whole = Count(sum(parts.values()))
        self.parts = {name: Count(total) for name, total in parts.items()}
        self._unit, self._quiet, self._file, self._clock = unit, quiet, file or sys.stderr, clock
        self._begun = self._told = clock()
        self._bars: Bars | None = None
        self._tasks: dict[str | None, TaskID] = {}
        self._open = ExitStack()

    def __enter__(self) -> Tracker:
        self._begun = self._clock()
        self._told = self._begun + FIRST - EVERY
        if not self._quiet and self._file.isatty():
            self._bars = self._open.enter_context(_bars(self._file))
            self._tasks[None] = self._bars.add_task(self.title, total=self.whole.total, left="")
            for name, count in self.parts.items() if 1 < len(self.parts) <= MOST else ():
                self._tasks[name] = self._bars.add_task(f"  {name}", total=count.total, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show(final=True)
        self._open.close()

    def advance(self, part: str | None = None, *, by: int = 1, kept: bool = False) -> None:
        """Count items as done, in a part if there are several; `kept` ones came from an earlier run."""
        name = next(iter(self.parts)) if part is None else part
        for count in (self.whole, self.parts[name]):
            count.done += by
            count.kept += by * kept
        self._show()

    def leave_out(self, part: str) -> None:
        """Drop the rest of a part from the totals."""
        count = self.parts[part]
        self.whole.total -= count.total - count.done
        count.total = count.done
        self._show()

    def _show(self, final: bool = False) -> None:
        if self._quiet:
            return
        now = self._clock()
        seconds = now - self._begun
        if self._bars is not None:
            for name, task in self._tasks.items():
                count = self.whole if name is None else self.parts[name]
                self._bars.update(task, completed=count.done, total=count.total, left=_words(count, seconds))
        elif (final and self._told > self._begun) or (not final and now - self._told >= EVERY):
            self._told = now
            several = ", ".join(f"{name} {count}" for name, count in self.parts.items())
            more = f" ({several})" if 1 < len(self.parts) <= MOST else ""
            print(f"{self.title}: {self.whole} {self._unit}{_words(self.whole, seconds, ', ')}{more}", file=self._file)


def tracked(items: Iterable[T], total: int, title: str, *, unit: str, quiet: bool) -> Iterator[T]:
    """Yield the items while their progress is shown."""
    with Tracker(title, {"": total}, unit=unit, quiet=quiet) as progress:
        for item in items:
            progress.advance()
            yield item


def _words(count: Count, seconds: float, before: str = "") -> str:
    """Return the number kept and the remaining time in words."""
    remaining = count.left(seconds) if count.done < count.total else None
    words = [f"{count.kept} kept"] if count.kept else []
    words += [f"{_time(remaining)} left"] if remaining is not None else []
    return before * bool(words) + ", ".join(words)


def _time(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def _bars(file: TextIO) -> Bars:
    from rich.console import Console  # noqa: PLC0415 -- where there is no terminal, it is not needed
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    text = TextColumn("{task.description}", markup=False)
    remaining = TextColumn("{task.fields[left]}", markup=False)
    return Bars(text, BarColumn(), MofNCompleteColumn(), remaining, console=Console(file=file))
