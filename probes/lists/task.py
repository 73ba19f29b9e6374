"""A benchmark of this kind: how its files are read, how its samples are scored, and the contents of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from probes.harness.comparison import SampleSet

S = TypeVar("S")


def nothing(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no figures beside those by condition."""
    return {}


@dataclass(frozen=True)
class Task(Generic[S]):
    """A benchmark.

    load: the samples of published files, whose images lie in a folder, those that are left out being added to a list;
    raises ValueError that names what is wrong. parts:
    the samples as a comparison asks them. metrics: those that the report shows, `share` the one by which it says
    what can be found, if any. reading: what they mean. totals: further figures of what was found, by condition. published:
    where a folder is given, the patterns of its files' names that are read; without any, `load` is given the folder itself.
    """

    title: str
    load: Callable[[Sequence[Path], Path, list[str]], list[S]]
    parts: Callable[[Sequence[S]], list[SampleSet[Any]]]
    metrics: Sequence[str]
    share: str | None
    reading: str
    unit: str = "questions"
    max_tokens: int = 16
    totals: Callable[[Mapping[str, Any]], Mapping[str, Any]] = nothing
    published: Sequence[str] = ()

    def files(self, given: Path) -> list[Path]:
        """Return the published files of a folder, by name, or a file itself; raise ValueError if a folder has none."""
        if not self.published or not given.is_dir():
            return [given]
        found = sorted(file for pattern in self.published for file in given.glob(pattern))
        if not found:
            raise ValueError(f"{given}: no file is called {' or '.join(self.published)}")
        return found
