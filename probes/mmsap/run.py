"""A run of the benchmark, which checks the options, draws samples, evaluates and reports."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.harness.benchmark import Findings
from probes.harness.conditions import Wanted
from probes.harness.missing import check_there, decodable
from probes.harness.session import Session, Setup
from probes.mmsap import file
from probes.mmsap.evaluate import evaluate
from probes.mmsap.report import report
from probes.mmsap.samples import PARTS, TITLES, SapSample


@dataclass(frozen=True)
class SapOptions:
    """The benchmark's own options.

    They are conditions, the number of times that every question is asked (`runs`), the file or folder of questions and the
    folder of their images, or `demo(count, seed)`, which draws questions.
    """

    wanted: Wanted
    runs: int
    data: str | None
    images: str | None
    demo: Callable[[int, int], Sequence[SapSample]] | None

    def __post_init__(self) -> None:
        if self.images and not self.data:
            raise ValueError("--images needs --data, the file or folder of the questions")
        check_there([self.data] if self.data else [])
        if not self.data and self.demo is None:
            raise ValueError("--data is needed: the demo world, which draws questions, is not installed")

    def draw(self, setup: Setup, left_out: list[str]) -> list[SapSample]:
        """Return the questions, of each part in proportion to its size; those left out are added to `left_out`."""
        if self.data is None:
            assert self.demo is not None
            return list(self.demo(setup.limit, setup.seed))
        samples = file.load(self.data, self.images, left_out)
        random.Random(setup.seed).shuffle(samples)
        sizes, placed = Counter(sample.part for sample in samples), Counter[str]()
        place = {}
        for sample in samples:
            place[id(sample)] = (placed[sample.part] + 0.5) / sizes[sample.part]
            placed[sample.part] += 1
        samples.sort(key=lambda sample: place[id(sample)])
        return decodable(samples, setup.limit, lambda sample: [sample.image], left_out)

    def origin(self, samples: Sequence[SapSample], seed: int) -> str:
        """Return the number of samples by part, their source and seed in words."""
        counts = Counter(sample.part for sample in samples)
        numbers = ", ".join(f"{counts[part]} of {TITLES[part]}" for part in PARTS if counts[part])
        source = "held-out scenes of the demo world" if self.data is None else Path(self.data).name
        return f"{len(samples)} questions ({numbers}), {source}, seed {seed}"


def run(options: SapOptions, session: Session) -> Findings:
    """Ask every question under every condition, with its options in another order in each run."""
    setup = session.setup
    left_out: list[str] = []
    samples = options.draw(setup, left_out)
    conditions = options.wanted.conditions(session)
    results, runs = evaluate(session.answerer, conditions, samples, options.runs, setup.seed, setup.quiet)
    about: dict[str, Any] = {
        "model": session.model, "data": options.origin(samples, setup.seed), "questions": len(samples),
        "left_out": len(left_out),
        "runs": options.runs, "seed": setup.seed, "versions": session.versions,
    }  # fmt: skip
    return Findings(report(about, results, runs), about, results, {"runs": runs})
