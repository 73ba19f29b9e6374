"""A run of the benchmark, which draws or reads questions, asks, and compares the readouts with the truth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from probes.alarm import journal
from probes.alarm.evaluate import ask, check_enough, evaluate
from probes.alarm.report import report
from probes.alarm.samples import Checked, load
from probes.calibration.measure import calibration_of
from probes.calibration.run import check_place
from probes.harness.benchmark import Findings
from probes.harness.missing import check_there, decodable
from probes.harness.options import check_writable
from probes.harness.session import Session, Setup
from steering.model.alarm import Alarm


@dataclass(frozen=True)
class FromJournal:
    """The judged answers of a journal (None: that of the settings) since a time, which `source` reads."""

    source: journal.Source
    place: str | None
    since: str | None


@dataclass(frozen=True)
class AlarmOptions:
    """The benchmark's own options.

    They are a file, or `demo(count, seed, noises)`, which draws questions, and whether the alarm is kept with the model's
    thresholds, replacing an existing one if `replace`. With `kept`, nothing is asked: a journal's answers choose the
    threshold.
    """

    data: str | None
    noises: tuple[float, ...]
    demo: Callable[[int, int, Sequence[float]], Sequence[Checked]] | None
    keep: bool = False
    replace: bool = False
    kept: FromJournal | None = None

    def __post_init__(self) -> None:
        check_there([] if self.data is None else [self.data])
        if self.data is None and self.demo is None and self.kept is None:
            raise ValueError("--data is needed: the demo world, which draws questions, is not installed")

    def draw(self, setup: Setup, skipped: list[str]) -> list[Checked]:
        """Return the questions, those of a file shuffled by the seed; questions left out are added to `skipped`."""
        if self.data is None:
            assert self.demo is not None
            return list(self.demo(setup.limit, setup.seed, self.noises))
        samples = load(self.data, skipped)
        random.Random(setup.seed).shuffle(samples)
        return decodable(samples, setup.limit, lambda sample: sample.images, skipped)

    def origin(self, questions: int, seed: int) -> str:
        """Return the number of questions, their source and seed in words."""
        if self.data is not None:
            return f"{questions} questions from {Path(self.data).name}, in the order of seed {seed}"
        levels = ", ".join(f"{noise:g}" for noise in self.noises)
        return (
            f"{questions} questions over held-out scenes of the demo world, with noise of standard deviation {levels} (of 0 "
            f"to 255) in turn, drawn with seed {seed}"
        )


def check_keep(setup: Setup) -> None:
    """Raise ValueError or PermissionError if no alarm of the model can be kept."""
    if setup.base_url is not None:
        raise ValueError("--keep needs a model in this process, not --base-url")
    check_writable(setup.model.calibrations)


def run(options: AlarmOptions, session: Session) -> Findings:
    """Ask every question, and evaluate how well the readouts show wrong answers."""
    if options.kept is not None:
        stored = options.kept
        return journal.run(stored.source, session, stored.place, stored.since, options.keep, options.replace)
    if session.endpoint is not None and not session.endpoint.is_helmsight:
        raise ValueError(f"{session.model} is not a Helmsight server: no other server reports readouts.")
    setup, folder = session.setup, session.setup.model.calibrations
    if options.keep and session.engine is not None:
        check_place(session.engine.mllm.fingerprint, folder, "alarm", replaced=options.replace)
    skipped: list[str] = []
    samples = options.draw(setup, skipped)
    check_enough(len(samples))
    results = evaluate(ask(session.answerer, samples, seed=setup.seed, quiet=setup.quiet), seed=setup.seed)
    about = {
        "model": session.model, "data": options.origin(len(samples), setup.seed), "questions": len(samples),
        "left_out": len(skipped),
        "seed": setup.seed, "versions": session.versions,
    }  # fmt: skip
    if options.keep and session.engine is not None:
        if results["alarm"] is None:
            raise ValueError("--keep: all numbers that an alarm can use are the same for these answers")
        calibration = replace(calibration_of(session.engine), alarm=Alarm.of(results["alarm"]))
        calibration.keep(folder)
        session.engine.calibrate(calibration)
    return Findings(report(about, results), about, {}, results)
