"""`helmsight probe`: build a vector, calibrate and report it; `helmsight probe reliability`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from probes.conflicts.options import Data, Images, Instructions, MC2File, Tasks
from probes.harness.options import (
    VECTOR,
    Defaults,
    ModelOptions,
    Quiet,
    Seed,
    file_option,
    goes_on,
    log_warnings,
    sample_option,
)

if TYPE_CHECKING:
    from probes.calibration.run import CalibrationPart

_direction = partial(Option, rich_help_panel="The direction")
_calibration = partial(Option, rich_help_panel="The calibration")
_instead = partial(Option, rich_help_panel="Measurements instead of a vector")


def probe(
    context: typer.Context,
    part: Annotated[Literal["reliability"] | None, Argument(
        help="instead of building a vector, report the modality that the answers of each task rely on, right or wrong: a "
        "question votes for the modality whose removal lowers the answer's probability more",
    )] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    mc2: MC2File = None,
    images: Images = None,
    tasks: Tasks = None,
    wording: Instructions = "paper",
    samples: Annotated[int, sample_option(min=1, metavar="N", help="samples to probe")] = 128,
    position: Annotated[int, _direction(
        metavar="P", help="prompt token whose hidden state is read, counted from the end: -1 (the last) as in the paper, "
        "-2 as in the authors' plots",
    )] = -1,
    weight_size: Annotated[Literal["queries", "mean", "l2"], _direction(
        help="norm of the direction in the weight: the mean over queries of |v(q)|, |mean v|, or L2 norms of direction "
        "and states",
    )] = "queries",
    weight_states: Annotated[Literal["plain", "instructed"], _direction(
        help="prompts whose hidden states set the norm of the direction",
    )] = "plain",
    layers: Annotated[list[int] | None, _direction(
        metavar="L...", help="only consider these layers, counted from 0",
    )] = None,
    states: Annotated[int, _direction(metavar="N", help="samples in the plot of hidden states, 0 for none")] = 100,
    name: Annotated[str, file_option(help="name of the vector")] = VECTOR,
    out: Annotated[Path | None, file_option(
        metavar="FILE", help="where to save it (default: as a candidate in the first folder of vectors, "
        "~/.helmsight/vectors, which nothing uses before 'helmsight vectors use NAME')",
    )] = None,
    use: Annotated[bool, file_option(
        "--use", help="let NAME stand for it at once: 'serve', running servers, 'vectors' and 'eval' find it before the "
        "model's own",
    )] = False,
    replace: Annotated[bool, file_option(
        "--replace", help="overwrite an existing vector or calibration",
    )] = False,
    report: Annotated[Path | None, file_option(
        metavar="DIR", help="folder for the report and the state that an interrupted run resumes from (default: "
        "build/probe/NAME)",
    )] = None,
    force: Annotated[bool, file_option(
        "--force", help="save the vector even if no reliable direction was found",
    )] = False,
    calibrate: Annotated[bool, Option(
        help="find the layer and strength that steer in both directions with the least damage",
    )] = True,
    calibration_samples: Annotated[int, _calibration(min=1, metavar="N", help="samples for the calibration")] = 64,
    strengths: Annotated[list[float] | None, _calibration(
        "--strengths", "--doses", metavar="S...", help="strengths to try, in published units",
    )] = None,
    budget: Annotated[list[str] | None, _calibration(
        metavar="NAME=LIMIT...",
        help="largest damage allowed: others (rise of their share), accuracy (fall), kl (nats), repetition (rise)",
    )] = None,
    calibrate_sage: Annotated[bool, _instead(
        "--calibrate-sage",
        help="measure the thresholds of SAGE's Think on --samples prompts, and save them beside the vectors",
    )] = False,
    calibrate_sinks: Annotated[bool, _instead(
        "--calibrate-sinks",
        help="measure the image positions that always attract attention (sinks), and save them beside the vectors",
    )] = False,
    calibrate_flags: Annotated[bool, _instead(
        "--calibrate-flags", help="choose the thresholds of the flags on --samples questions with clean and noisy "
        "images, measure how often each flag is raised on right and on wrong answers, and save them beside the vectors",
    )] = False,
    calibrate_surprise: Annotated[bool, _instead(
        "--calibrate-surprise", help="measure the surprise of clean text contexts, the bound that steering 'auto' by "
        "surprise uses, and save it beside the vectors",
    )] = False,
    markdown: Annotated[Path | None, _instead(
        metavar="FILE", help="with --calibrate-flags: write its report to this file",
    )] = None,
    json: Annotated[Path | None, _instead(metavar="FILE", help="with reliability: write the votes to this file")] = None,
    base_url: Annotated[str | None, _instead(
        metavar="URL", help="with reliability: ask this Helmsight server instead of a model in this process; --model names "
        "its model, the variable OPENAI_API_KEY its key",
    )] = None,
    **model: Any,
) -> None:  # fmt: skip
    """Build a steering vector from conflicting samples, calibrate its strength on others, and save it with a report.

    Run it again after an interruption to continue.
    """
    log_warnings()
    parts: dict[CalibrationPart, bool] = {
        "flags": calibrate_flags, "sinks": calibrate_sinks, "surprise": calibrate_surprise, "sage": calibrate_sage,
    }  # fmt: skip
    kinds = [kind for kind, chosen in parts.items() if chosen]
    if len(kinds) > 1:
        first, second = kinds[:2]
        raise ValueError(
            f"--calibrate-{first} and --calibrate-{second} are two measurements: run the command for each of them"
        )
    measured = kinds[0] if kinds else None
    if part is None and json is not None:
        raise ValueError(
            "--json goes with 'probe reliability'; the numbers of a probe are in report.json in the folder of --report"
        )
    if part is None and base_url is not None:
        raise ValueError(
            "--base-url goes with 'probe reliability': all else needs the model's hidden states, which no server sends"
        )
    if part is None and markdown is not None and measured != "flags":
        raise ValueError("--markdown goes with --calibrate-flags; the report of a probe is in the folder of --report")
    defaults: Defaults = context.obj
    model_options = ModelOptions.of(defaults, **model)
    data = Data.of(defaults, mc2, images, tasks, seed)
    with goes_on():
        if part is not None:
            from probes.vector import reliability

            reliability.run(model_options, data, samples, json, quiet, base_url)
        elif measured is not None:
            from probes.calibration import run as calibration

            calibration.run(
                calibration.CalibrationOptions(measured, model_options, data, samples, replace, markdown, quiet)
            )
        else:
            from probes.vector import run as building
            from probes.vector.build import Recipe

            building.run(
                building.ProbeOptions(
                    model=model_options,
                    data=data,
                    name=name,
                    recipe=Recipe(wording, position, weight_size, weight_states),
                    samples=samples,
                    calibrated=calibration_samples if calibrate else 0,
                    layers=None if layers is None else tuple(layers),
                    strengths=strengths_of(strengths),
                    budget=building.budget_of(budget or ()),
                    states=states,
                    out=_candidate(out, name, defaults, use=use),
                    used_from=None if out is not None else (*defaults.vectors(), Path(model_options.path) / "vectors"),
                    use=use,
                    folder=report or Path("build/probe") / name,
                    force=force,
                    replace=replace,
                    quiet=quiet,
                )
            )


def _candidate(out: Path | None, name: str, defaults: Defaults, *, use: bool) -> Path:
    """Return the file for a probe's vector; without --out or --use it is a candidate."""
    if use and out is not None:
        raise ValueError("--use and --out exclude one another: a vector is used from the first folder of vectors")
    from steering.vectors.candidates import candidate_file

    path = place(out, name, defaults)
    return path if use or out is not None else candidate_file(path.parent, name)


def strengths_of(given: Sequence[float] | None) -> tuple[float, ...]:
    """Return the strengths to try, by default those of the calibration; raise ValueError for one that is no strength."""
    from probes.vector.calibrate import STRENGTHS

    for strength in given or ():
        if not 0 < strength < math.inf:
            raise ValueError(f"--strengths {strength:g}: a strength must be positive and finite")
    return tuple(given or STRENGTHS)


def place(out: Path | None, name: str, defaults: Defaults) -> Path:
    """Return the file for a vector; without --out it is in the first folder of vectors."""
    if out is not None:
        return out.expanduser()
    if not (folders := defaults.vectors()):
        raise ValueError("there is no folder of vectors to save it in: give --out")
    return folders[0] / f"{name}.safetensors"
