"""`helmsight vectors build`: a vector from a file of pairs of prompts, or a condition from examples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from probes.commands.probe import place, strengths_of
from probes.harness.options import (
    Defaults,
    ModelOptions,
    Quiet,
    Seed,
    file_option,
    goes_on,
    log_warnings,
)

Learner = Literal["mean", "actadd", "pca", "lat", "iti", "probe"]  # as in `pairs.learners`, which loads slowly
_calibration = partial(Option, rich_help_panel="The calibration")

HELD_BACK = 64
"""The lines that are held back for the calibration by default."""


def build(
    context: typer.Context,
    pairs: Annotated[Path | None, Option(
        metavar="FILE", help='JSON Lines with an object per line: the messages "toward" one side and those "away" from '
        'it, or {"states": file} in their place; images are files, relative to this one, or data: URLs',
    )] = None,
    gate: Annotated[Path | None, Option(
        metavar="FILE", help='build a condition for "steering": {"when": ...} instead, from JSON Lines with an object per '
        'line: the messages of a prompt under "when", where it should hold, or under "not"',
    )] = None,
    learner: Annotated[Learner | None, Option(
        metavar="LEARNER",
        help="method that makes a direction of the states: their mean difference (the default), that of a single pair "
        "(actadd), a principal component of the states (pca) or of the differences (lat), the mean difference in "
        "deviations at the layer with the best probe (iti), or the weights of a logistic probe. A condition of --gate has "
        "mean or probe",
    )] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    sides: Annotated[tuple[str, str], Option(
        metavar="PLUS MINUS", help="names of the two sides: a positive scale steers toward the first",
    )] = ("toward", "away"),
    layers: Annotated[list[int] | None, Option(
        metavar="L...", help="only consider these layers, counted from 0",
    )] = None,
    score: Annotated[Literal["holds", "begins"] | None, _calibration(
        help='calibrate on lines that also have a "question" and "expect": {"toward": text, "away": text}: an answer '
        'counts for the side whose text it contains, or begins with',
    )] = None,
    calibration_samples: Annotated[int | None, _calibration(
        min=1, metavar="N", show_default=str(HELD_BACK),
        help="lines held back for the calibration, at most a third of all",
    )] = None,
    strengths: Annotated[list[float] | None, _calibration(
        metavar="S...", help="strengths to try, in published units",
    )] = None,
    name: Annotated[str | None, file_option(help="name of the vector (default: that of FILE)")] = None,
    out: Annotated[Path | None, file_option(
        metavar="FILE", help="where to save it (default: NAME.safetensors in the first folder of vectors, "
        "~/.helmsight/vectors)",
    )] = None,
    replace: Annotated[bool, file_option("--replace", help="overwrite an existing vector")] = False,
    report: Annotated[Path | None, file_option(
        metavar="DIR", help="folder for the report and the state that an interrupted run resumes from (default: "
        "build/pairs/NAME)",
    )] = None,
    force: Annotated[bool, file_option(
        "--force", help="save the vector even if there are doubts about it",
    )] = False,
    **model: Any,
) -> None:  # fmt: skip
    """Build a steering vector of any contrast from pairs of prompts, or a condition of steering, and save it with a report.

    Give --pairs or --gate. Without --score strength 1.0 is the published weight, which may be too much. Run again after an
    interruption, a mean difference continues where it stopped.
    """
    log_warnings()
    defaults: Defaults = context.obj
    model_options = ModelOptions.of(defaults, **model)
    model_options.check()
    if pairs is None and gate is None:
        raise ValueError("give --pairs for a vector, or --gate for a condition")
    if pairs is not None and gate is not None:
        raise ValueError("--pairs and --gate exclude one another: a vector and a condition are built one at a time")
    given = {"--score": score, "--strengths": strengths, "--calibration-samples": calibration_samples}
    calibrating = [option for option, value in given.items() if value]
    if gate is not None and calibrating:
        raise ValueError(f"{calibrating[0]} calibrates a vector of --pairs; --gate chooses its threshold by itself")
    if score is None and calibrating:
        raise ValueError(f"{calibrating[0]} needs --score, which calibrates the strength")
    if gate is not None and learner not in (None, "mean", "probe"):
        raise ValueError(f"--learner {learner} needs pairs; a condition of --gate has mean or probe")
    source = pairs or gate
    assert source is not None
    called = source.stem.lower() if name is None else name
    with goes_on():
        from probes.gate import run as gates
        from probes.pairs import run

        of_file = run.run if gate is None else gates.run
        of_file(
            run.PairsOptions(
                model=model_options,
                pairs=source,
                name=called,
                sides=sides,
                learner=learner or "mean",
                layers=None if layers is None else tuple(layers),
                score=score,
                calibrated=calibration_samples or HELD_BACK,
                strengths=strengths_of(strengths),
                out=place(out, called, defaults),
                folder=report or Path("build/pairs") / called,
                seed=seed,
                force=force,
                replace=replace,
                quiet=quiet,
            )
        )
