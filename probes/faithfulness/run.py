"""A run of the benchmark, which draws or reads samples, forces the answers and reports."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.faithfulness.evaluate import apart, compared, read, separated
from probes.faithfulness.report import report
from probes.faithfulness.samples import ForcedAnswerSample, load
from probes.harness.benchmark import Findings
from probes.harness.missing import check_there, decodable
from probes.harness.session import Session, Setup


@dataclass(frozen=True)
class ToldOptions:
    """The benchmark's own options: a file, or `demo(count, seed, noise)`, which draws samples."""

    data: str | None
    noise: float
    demo: Callable[[int, int, float], Sequence[ForcedAnswerSample]] | None

    def __post_init__(self) -> None:
        check_there([] if self.data is None else [self.data])
        if self.data is None and self.demo is None:
            raise ValueError("--data is needed: the demo world, which draws samples, is not installed")

    def draw(self, setup: Setup, skipped: list[str]) -> list[ForcedAnswerSample]:
        """Return the samples, those of a file shuffled by the seed; samples left out are added to `skipped`."""
        if self.data is None:
            assert self.demo is not None
            return list(self.demo(setup.limit, setup.seed, self.noise))
        samples = load(self.data, skipped)
        random.Random(setup.seed).shuffle(samples)
        return decodable(samples, setup.limit, lambda sample: sample.images, skipped)

    def origin(self, samples: int, seed: int) -> str:
        """Return the number of samples, their source and seed in words."""
        if self.data is not None:
            return f"{samples} samples from {Path(self.data).name}, in the order of seed {seed}"
        noise = f" with noise of standard deviation {self.noise:g} (of 0 to 255)" if self.noise else ""
        return f"{samples} samples over held-out scenes of the demo world{noise}, drawn with seed {seed}"


def run(options: ToldOptions, session: Session) -> Findings:
    """Force both answers to every question, and compare their readouts."""
    if session.endpoint is not None and not session.endpoint.is_helmsight:
        raise ValueError(
            f'{session.model} is not a Helmsight server: no other server accepts a forced answer ("force").'
        )
    setup = session.setup
    skipped: list[str] = []
    samples = options.draw(setup, skipped)
    answers = read(session.answerer, samples, quiet=setup.quiet)
    results: dict[str, Any] = {"read": compared(answers), "separated": separated(answers, seed=setup.seed)}
    if session.engine is not None:
        results["apart"] = apart(session.engine, samples)
    about = {
        "model": session.model, "data": options.origin(len(samples), setup.seed), "samples": len(samples),
        "left_out": len(skipped),
        "noise": options.noise, "seed": setup.seed, "versions": session.versions,
    }  # fmt: skip
    return Findings(report(about, results), about, {}, results)
