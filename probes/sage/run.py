"""A run of the benchmark, which checks the options, draws samples, evaluates and reports."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.harness.benchmark import Findings
from probes.harness.conditions import Conditions
from probes.harness.missing import decodable
from probes.harness.session import Session, Setup
from probes.image_qa import pope
from probes.image_qa.yes_no import YesNo
from probes.sage.evaluate import evaluate
from probes.sage.report import report
from probes.sage.samples import Difference

Drawn = tuple[Sequence[YesNo], Sequence[Difference], Sequence[str], str]
"""Questions, pairs, the names of the objects that a claim may be about, and the name of the scenes' world."""


@dataclass(frozen=True)
class SageOptions:
    """The benchmark's own options.

    They are `conditions` by name, the number of `pairs` (None: as many as questions), POPE's files and the folder of their
    images, or `demo(questions, pairs, seed, noise, model)`, which draws questions and pairs.
    """

    conditions: Conditions
    pairs: int | None
    noise: float
    pope: tuple[str, ...]
    images: str | None
    demo: Callable[[int, int, int, float, str], Drawn] | None

    def __post_init__(self) -> None:
        if self.pope and not self.images:
            raise ValueError("--pope needs --images, the folder of COCO val2014")
        if not self.pope and self.demo is None:
            raise ValueError("--pope is needed: the demo world, which draws questions, is not installed")

    def draw(self, setup: Setup, left_out: list[str]) -> Drawn:
        """Return POPE's questions if files are given, otherwise the demo world's with pairs and names of objects.

        Questions that are left out are added to `left_out`.
        """
        if not self.pope:
            assert self.demo is not None
            pairs = setup.limit if self.pairs is None else self.pairs
            return self.demo(setup.limit, pairs, setup.seed, self.noise, setup.model.path)
        assert self.images is not None
        samples = pope.load(self.pope, self.images, left_out)
        random.Random(setup.seed).shuffle(samples)
        return decodable(samples, setup.limit, lambda sample: [sample.image], left_out), [], (), ""

    def origin(self, questions: int, pairs: int, seed: int, scenes: str) -> str:
        """Return the number of samples, their source, scenes and seed in words."""
        if self.pope:
            names = ", ".join(Path(file).name for file in self.pope)
            return f"{questions} existence questions from {names}, in the order of seed {seed}"
        noise = f" with noise of standard deviation {self.noise:g} (of 0 to 255)" if self.noise else ""
        return (
            f"{questions} existence questions and {pairs} pairs of images over held-out scenes of {scenes}{noise}, "
            f"drawn with seed {seed}"
        )


def run(options: SageOptions, session: Session) -> Findings:
    """Ask every question under every condition."""
    setup = session.setup
    if session.endpoint is not None and any(options.conditions.values()):
        session.endpoint.check_interventions()
    left_out: list[str] = []
    existence, differences, categories, scenes = options.draw(setup, left_out)
    scores = evaluate(session.answerer, options.conditions, existence, differences, categories, setup.quiet)
    about: dict[str, Any] = {
        "model": session.model, "data": options.origin(len(existence), len(differences), setup.seed, scenes),
        "questions": len(existence), "pairs": len(differences), "noise": options.noise, "seed": setup.seed,
        "left_out": len(left_out), "versions": session.versions,
    }  # fmt: skip
    return Findings(report(about, scores), about, scores)
