"""A run of the benchmark, which draws or reads samples, asks, scores and reports."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.harness.benchmark import Findings
from probes.harness.comparison import BASELINE, measured
from probes.harness.conditions import Wanted
from probes.harness.missing import check_there, decodable
from probes.harness.session import Session, Setup
from probes.stme import file
from probes.stme.answers import Scoring
from probes.stme.evaluate import Asking, by_task
from probes.stme.findings import findings
from probes.stme.report import report
from probes.stme.samples import TargetSample

DRAWN_TOKENS, READ_TOKENS = 24, 256
"""The most tokens of an answer: to a drawn sample, and to one that asks for reasons (the authors' scripts)."""


@dataclass(frozen=True)
class StmeOptions:
    """The benchmark's own options.

    They are files with the folders of their pictures and of MileBench, or `demo(count, seed, noise)`, which draws samples.
    """

    wanted: Wanted
    shuffles: int
    scoring: Scoring | None
    max_tokens: int | None
    noise: float
    data: tuple[str, ...]
    images: str | None
    choices: str | None
    full_size: bool
    tasks: frozenset[str]
    demo: Callable[..., Sequence[TargetSample]] | None

    def __post_init__(self) -> None:
        if self.data and not self.images:
            raise ValueError("--data needs --images, the folder of its images")
        check_there(self.data)
        if not self.data and self.demo is None:
            raise ValueError("--data is needed: the demo world, which draws samples, is not installed")
        if not self.data and (self.images or self.choices or self.full_size):
            raise ValueError("--images, --choices and --full-size need --data")

    def draw(self, setup: Setup) -> tuple[list[TargetSample], int]:
        """Return the samples, and the number of those left out."""
        left_out: list[str] = []
        if self.data:
            assert self.images is not None
            samples, missing = file.load(self.data, self.images, self.choices, self.full_size)
            left_out += [*missing.images, *missing.targets]
            random.Random(setup.seed).shuffle(samples)
        else:
            assert self.demo is not None
            samples = list(self.demo(setup.limit * (6 if self.tasks else 1), setup.seed, self.noise))
        tasks = {sample.task for sample in samples}
        if unknown := self.tasks - tasks:
            raise ValueError(f"--tasks: unknown {', '.join(sorted(unknown))}; there are {', '.join(sorted(tasks))}")
        selected = [sample for sample in samples if not self.tasks or sample.task in self.tasks]
        if not self.data:
            return selected[: setup.limit], 0
        return decodable(selected, setup.limit, lambda sample: sample.images, left_out), len(left_out)

    def origin(self, samples: Sequence[TargetSample], seed: int) -> str:
        """Return the number of samples, their source and seed in words."""
        if self.data:
            names = ", ".join(Path(path).name for path in self.data)
            return f"{len(samples)} samples from {names}, in the order of seed {seed}"
        noise = f" with noise of standard deviation {self.noise:g} (of 0 to 255)" if self.noise else ""
        return f"{len(samples)} samples over held-out scenes of the demo world{noise}, drawn with seed {seed}"


def run(options: StmeOptions, session: Session) -> Findings:
    """Ask every sample under every condition, and the controls without interventions."""
    setup = session.setup
    conditions = options.wanted.conditions(session)
    samples, left_out = options.draw(setup)
    if not samples:
        raise ValueError("No samples are left to ask.")
    scoring = options.scoring or ("published" if options.data else "robust")
    tokens = options.max_tokens or (READ_TOKENS if options.data else DRAWN_TOKENS)
    asking = Asking(samples, options.shuffles, setup.seed, scoring, tokens, setup.quiet)
    answered = asking.ask(session.answerer, conditions)
    plain = answered[BASELINE]
    controls = asking.ask_controls(session.answerer, plain)
    results = measured({name: [answers] for name, answers in answered.items()})
    about: dict[str, Any] = {
        "model": session.model, "data": options.origin(samples, setup.seed), "samples": len(samples), "left_out": left_out,
        "not_shuffled": sum(not sample.movable for sample in samples), "shuffles": options.shuffles, "scoring": scoring,
        "max_tokens": tokens, "seed": setup.seed, "noise": options.noise, "versions": session.versions,
    }  # fmt: skip
    more = {"tasks": by_task(plain), **findings(asking, answered, controls)}
    case = more.get("patches", {}).get("case", {}).get("sample")
    picture = next((sample.picture(sample.target) for sample in samples if sample.id == case), None)
    return Findings(report(about, results, more, picture), about, results, more)
