"""`helmsight prepare`: measure everything that a model lacks, one part after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from probes.conflicts.options import Data, Images, MC2File, Tasks
from probes.harness.options import (
    Defaults,
    ModelOptions,
    Quiet,
    Seed,
    file_option,
    goes_on,
    log_warnings,
    sample_option,
)


def prepare(
    context: typer.Context,
    model: Annotated[str | None, Argument(
        metavar="MODEL", help="checkpoint folder, hub name or demo:NAME (default: the embedded model)",
    )] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    mc2: MC2File = None,
    images: Images = None,
    tasks: Tasks = None,
    samples: Annotated[int, sample_option(min=1, metavar="N", help="samples of each measurement")] = 128,
    calibration_samples: Annotated[int, sample_option(
        min=1, metavar="N", help="further samples on which the vector's strength is chosen",
    )] = 64,
    questions: Annotated[int, sample_option(
        min=1, metavar="N", help="questions whose right and wrong answers choose the thresholds of flags and alarm",
    )] = 1200,
    data: Annotated[str | None, sample_option(
        metavar="FILE", help="questions for the alarm, as of 'eval alarm' (default: those of the demo world)",
    )] = None,
    only: Annotated[list[str] | None, Option(
        metavar="PART...", help="only these parts: vector, sage, sinks, flags, alarm, surprise",
    )] = None,
    report: Annotated[Path, file_option(
        metavar="DIR", help="folder for the reports and the answers that an interrupted run resumes from",
    )] = Path("build/prepare"),
    **loading: Any,
) -> None:  # fmt: skip
    """Measure everything that a model lacks: its steering vector, and what SAGE, sinks, flags, alarm and surprise need.

    Parts that are there are kept. Run it again after an interruption to continue. The exit status is 1 if a part could not
    be measured.
    """
    log_warnings()
    defaults: Defaults = context.obj
    model_options = ModelOptions.of(defaults, model, **loading)
    drawn = Data.of(defaults, mc2, images, tasks, seed)
    with goes_on():
        from probes.prepare import run as preparing

        options = preparing.PrepareOptions(
            model_options, drawn, samples, calibration_samples, questions, data, tuple(only or ()), report, quiet,
        )  # fmt: skip
        raise typer.Exit(int(not preparing.run(options, defaults)))
