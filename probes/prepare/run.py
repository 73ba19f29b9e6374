"""A run of `helmsight prepare`, which measures each missing part of a model and keeps it before it begins the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from probes.alarm import run as alarm
from probes.alarm.command import NOISES
from probes.calibration import run as calibration
from probes.calibration.run import CalibrationPart
from probes.conflicts.options import Data
from probes.harness.bootstrap import check_statistics
from probes.harness.options import VECTOR, Defaults, ModelOptions, check_writable
from probes.harness.session import Session, Setup
from probes.vector import run as vector
from probes.vector.build import Recipe
from probes.vector.calibrate import STRENGTHS, Budget
from steering import Engine, VectorError, VectorStore
from steering.errors import SteeringError
from steering.readiness import PARTS, PartState, PreparedPart, states, table
from steering.readiness import VECTOR as VECTOR_PART

KINDS: dict[str, CalibrationPart] = {"sage": "sage", "sinks": "sinks", "flags": "flags", "surprise": "surprise"}
"""The parts that `helmsight probe --calibrate-...` measures, by name."""


@dataclass(frozen=True)
class PrepareOptions:
    """The options of a preparation.

    samples, calibrated, questions: the numbers of samples of a measurement, of those for the vector's strength, and of
    questions for flags and alarm. alarm_data: the alarm's questions, None for the demo world's. only: the names of the parts
    to consider, empty for all. folder: for reports, and for what an interrupted run continues from. Raises ValueError for an
    unknown part.
    """

    model: ModelOptions
    data: Data
    samples: int
    calibrated: int
    questions: int
    alarm_data: str | None
    only: tuple[str, ...]
    folder: Path
    quiet: bool
    strengths: tuple[float, ...] = tuple(STRENGTHS)

    def __post_init__(self) -> None:
        names = [part.name for part in PARTS]
        if unknown := [name for name in self.only if name not in names]:
            raise ValueError(f"--only: unknown {unknown[0]!r}; there are {', '.join(names)}")

    @property
    def parts(self) -> list[PreparedPart]:
        """The parts to consider, in the order in which they are measured."""
        return [part for part in PARTS if not self.only or part.name in self.only]


def run(options: PrepareOptions, defaults: Defaults) -> bool:
    """Measure what is missing, print the times and at the end the state of every part; return whether all are there.

    A part that cannot be measured is reported with the reason, and the others are measured nevertheless.
    """
    check_statistics()
    options = replace(options, model=replace(options.model, engines={}))  # one load of the model serves all parts
    for folder in (options.folder, options.model.calibrations):
        check_writable(folder)
    engine = options.model.engine(options.quiet)
    begun, failed = time.monotonic(), dict[str, str]()
    for number, part in enumerate(options.parts, 1):
        heading = f"[{number}/{len(options.parts)}] {part.name}, for {part.serves}"
        if part.measured in _measured(options, engine):
            print(f"{heading}: already there")
            continue
        print(heading, flush=True)
        since = time.monotonic()
        try:
            _steps(options, defaults)[part.name]()
        except (ValueError, OSError, SteeringError) as error:
            failed[part.name] = str(error).replace("--limit", "--questions")  # its name here
        outcome = "failed" if part.name in failed else "done"
        print(
            f"[{number}/{len(options.parts)}] {part.name}: {outcome} after {time.monotonic() - since:.1f} s", flush=True
        )
    print(f"\nprepared in {time.monotonic() - begun:.1f} s")
    part_states = [state for state in states(_measured(options, engine)) if state.part in options.parts]
    print("\n".join(_lines(part_states, failed, options.model.path)))
    return all(state.there for state in part_states)


def _lines(part_states: list[PartState], failed: Mapping[str, str], model: str) -> list[str]:
    """Return the lines of the table, and below it why parts could not be measured."""
    return [*table(part_states, model), *(f"{name} could not be measured: {reason}" for name, reason in failed.items())]


def _measured(options: PrepareOptions, engine: Engine) -> set[str]:
    """Return the names of the parts that the model has now, as `PreparedPart.measured`."""
    mllm = engine.mllm
    names = set(() if mllm.calibration is None else mllm.calibration.parts)
    store = VectorStore(*options.model.vectors(), Path(options.model.path) / "vectors", fingerprint=mllm.fingerprint)
    try:
        vector = store.get(VECTOR)
    except (VectorError, OSError):
        return names
    fits = vector.fingerprint == mllm.fingerprint and vector.positive is not None
    return {*names, VECTOR_PART} if fits else names


def _steps(options: PrepareOptions, defaults: Defaults) -> dict[str, Callable[[], object]]:
    """Return what measures each part."""

    def calibrate(kind: CalibrationPart) -> None:
        count = options.questions if kind == "flags" else options.samples
        calibration_options = calibration.CalibrationOptions(
            kind, options.model, options.data, count, replace=False, markdown=None, quiet=options.quiet
        )
        calibration.run(calibration_options)

    return {
        VECTOR_PART: lambda: _probe(options),
        "alarm": lambda: _alarm(options, defaults),
        **{name: lambda kind=kind: calibrate(kind) for name, kind in KINDS.items()},  # type: ignore[misc]
    }


def _probe(options: PrepareOptions) -> None:
    folders = options.model.vectors()
    if not folders:
        raise ValueError("there is no folder of vectors to save one in")
    vector.run(
        vector.ProbeOptions(
            model=options.model,
            data=options.data,
            name=VECTOR,
            recipe=Recipe(),
            samples=options.samples,
            calibrated=options.calibrated,
            layers=None,
            strengths=options.strengths,
            budget=Budget(),
            states=0,
            out=folders[0] / f"{VECTOR}.safetensors",
            used_from=(*folders, Path(options.model.path) / "vectors"),
            use=True,
            folder=options.folder / "vector",
            force=False,
            replace=False,
            quiet=options.quiet,
        )
    )


def _alarm(options: PrepareOptions, defaults: Defaults) -> None:
    folder = options.folder / "alarm"
    setup = Setup(options.model, options.questions, options.data.seed, options.quiet, folder)
    alarm_options = alarm.AlarmOptions(options.alarm_data, tuple(NOISES), defaults.draw.get("alarm"), keep=True)
    findings = alarm.run(alarm_options, Session(setup))
    findings.page.write(folder, {"about": findings.about, **findings.more})
    print(f"report: {folder / 'report.html'}")
