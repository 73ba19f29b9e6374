"""A benchmark of this kind: how its files are read, how its samples are scored, and the contents of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from probes.harness.comparison import SampleSet, Way
from probes.image_qa.baselines import Instructed

S = TypeVar("S")


def nothing(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no figures beside those by condition."""
    return {}


@dataclass(frozen=True)
class Task(Generic[S]):
    """A benchmark.

    load: returns the samples of published files, whose images lie in a folder, and adds those left out to a list; raises
    ValueError that names what is wrong. parts: returns the samples as a comparison asks them. metrics: those that the report
    shows; `share` is the one whose detectable difference it reports, if any. reading: explains the metrics. totals: further
    figures by condition. published: the patterns of the file names that are read from a folder; without any, `load`
    receives the folder itself. instructed: the baselines that steering is compared with, where the papers have them.
    conditions: the benchmark's own in place of all known ones.
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
    instructed: Instructed | None = None
    conditions: Callable[[], Mapping[str, Way]] | None = None

    def files(self, folder: Path) -> list[Path]:
        """Return the published files of a folder, by name, or a file itself; raise ValueError if a folder has none."""
        if not self.published or not folder.is_dir():
            return [folder]
        files = sorted(file for pattern in self.published for file in folder.glob(pattern))
        if not files:
            raise ValueError(f"{folder}: no file is called {' or '.join(self.published)}")
        return files
