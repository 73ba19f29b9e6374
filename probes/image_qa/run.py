"""A run of a list benchmark, which checks the options, draws samples, evaluates and reports."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.harness.benchmark import Findings
from probes.harness.comparison import compare
from probes.harness.conditions import Wanted
from probes.harness.missing import check_there, decodable
from probes.harness.session import Session, Setup
from probes.image_qa.baselines import NAMES, SHOTS
from probes.image_qa.report import report
from probes.image_qa.task import Task


@dataclass(frozen=True)
class ListOptions:
    """The benchmark's own options: conditions, its files and the folder of their images.

    Without files, `demo(count, seed, noise, model)` draws samples, with that `noise` on the pictures, and also returns the
    world in words.
    """

    name: str
    wanted: Wanted
    data: tuple[str, ...]
    images: str | None
    noise: float
    max_tokens: int | None
    demo: Callable[[int, int, float, str], tuple[list[Any], str]] | None
    baselines: bool = False

    def __post_init__(self) -> None:
        if self.images and not self.data:
            raise ValueError("--images needs --data, the published files")
        if self.data and self.noise:
            raise ValueError("--noise applies to the demo world's images, not to those of --data")
        check_there(self.data)
        if not self.data and self.demo is None:
            raise ValueError(f"--data is needed: no demo world is installed that draws samples of {self.name}")

    def draw(self, task: Task[Any], setup: Setup, left_out: list[str], more: int = 0) -> tuple[list[Any], str]:
        """Return the samples, those of files shuffled by the seed, and the name of their world; `more` than the limit.

        Samples that are left out are added to `left_out`. Raises ValueError if there are none.
        """
        if not self.data:
            assert self.demo is not None
            return self.demo(setup.limit + more, setup.seed, self.noise, setup.model.path)
        files = [Path(path) for path in self.data]
        folder = Path(self.images) if self.images else files[0] if files[0].is_dir() else files[0].parent
        samples = task.load([file for path in files for file in task.files(path)], folder, left_out)
        if not samples:
            raise ValueError(f"{', '.join(self.data)}: it holds no samples of {task.title}")
        random.Random(setup.seed).shuffle(samples)
        return decodable(samples, setup.limit + more, lambda sample: [sample.image], left_out), ""

    def origin(self, samples: int, unit: str, scenes: str, seed: int) -> str:
        """Return the number of samples, their source and seed in words."""
        if self.data:
            names = ", ".join(Path(path).name for path in self.data)
            return f"{samples} {unit} from {names}, in the order of seed {seed}"
        noise = f" with noise of standard deviation {self.noise:g} (of 0 to 255)" if self.noise else ""
        return f"{samples} {unit} over held-out scenes of {scenes}{noise}, drawn with seed {seed}"


def run(options: ListOptions, task: Task[Any], session: Session) -> Findings:
    """Ask every sample under every condition."""
    setup = session.setup
    left_out: list[str] = []
    if options.baselines and task.instructed is None:
        raise ValueError(f"--baselines: the papers have none for {task.title}")
    more = SHOTS if options.baselines else 0
    samples, scenes = options.draw(task, setup, left_out, more)
    samples, examples = samples[: len(samples) - more], samples[len(samples) - more :]
    changes = task.instructed.changes(examples) if options.baselines and task.instructed else {}
    conditions = {
        name: way for name, way in options.wanted.conditions(session).items() if name not in NAMES or name in changes
    }
    length = options.max_tokens or task.max_tokens
    parts = task.parts(samples)
    results = compare(session.answerer, conditions, parts, max_tokens=length, changes=changes, quiet=setup.quiet)
    about: dict[str, Any] = {
        "model": session.model, "data": options.origin(len(samples), task.unit, scenes, setup.seed), "samples": len(samples),
        "left_out": len(left_out),
        "noise": options.noise, "max_tokens": length, "seed": setup.seed, "versions": session.versions,
    }  # fmt: skip
    totals = task.totals(results)
    return Findings(report(task, about, results, totals), about, results, {"totals": totals} if totals else {})
