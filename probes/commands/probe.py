"""`helmsight probe`: build a vector, calibrate it, and say what was found; `helmsight probe reliability`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.conflicts.options import Data, add_data
from probes.harness.options import Defaults, ModelOptions, add_model, guarded, positive
from probes.vector import VECTOR

if TYPE_CHECKING:
    from probes.calibration.run import CalibrationPart

_CALIBRATIONS: tuple[CalibrationPart, ...] = ("flags", "sinks", "surprise", "sage")
"""What may be measured instead of a vector; of several flags the first one counts."""


def register(subparsers: Any, defaults: Defaults) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "probe",
        help="build a modality-preference vector for a model",
        description="Build a steering vector from conflicting samples, calibrate its strength on others, and save it with a "
        "report. Run again after an interruption, it goes on where it was.",
    )
    parser.add_argument(
        "part", nargs="?", choices=("reliability",),
        help="instead of building anything, tell which modality the answers of each task rest on, right or wrong: a "
        "question votes for the one without which its answer's probability drops more",
    )  # fmt: skip
    add_model(parser, defaults)
    add_data(parser)
    parser.add_argument(
        "--samples", type=positive, default=128, metavar="N", help="samples to probe (default %(default)s)"
    )
    parser.add_argument(
        "--position", type=int, default=-1, metavar="P",
        help="token whose state is read, from the prompt's end: -1 the last one as in the paper, -2 the one before as in "
        "the authors' plots (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-size", choices=("queries", "mean"), default="queries",
        help="what the weight takes for the direction's size: the mean over queries of |v(q)|, or |mean v| "
        "(default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-states", choices=("plain", "instructed"), default="plain",
        help="the prompts whose states the direction is given the size of (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, nargs="+", metavar="L", help="only consider these layers, counted from 0")
    parser.add_argument("--name", default=VECTOR, help="name of the vector (default %(default)s)")
    parser.add_argument(
        "--out", metavar="FILE",
        help="where to save it (default: NAME.safetensors in the first folder of vectors, ~/.helmsight/vectors, where "
        "'serve', 'vectors' and 'eval' find it before the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--replace", action="store_true", help="write over a vector, or over a calibration, that is there already"
    )
    parser.add_argument(
        "--report", metavar="DIR",
        help="folder of the report, and of what a run that was stopped goes on from (default: build/probe/NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="save the vector also where no reliable direction was found"
    )
    parser.add_argument(
        "--calibrate", action=argparse.BooleanOptionalAction, default=True,
        help="find the layer and strength that steer both ways with the least damage",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-samples", type=positive, default=64, metavar="N", help="samples for that (default %(default)s)"
    )
    parser.add_argument(
        "--strengths",
        "--doses",
        type=float,
        nargs="+",
        metavar="S",
        help="strengths that are tried, in published units",
    )
    parser.add_argument(
        "--budget", nargs="+", default=[], metavar="NAME=MOST",
        help="most damage allowed: others (rise of their share), accuracy (fall), kl (nats), repetition (rise)",
    )  # fmt: skip
    parser.add_argument(
        "--states", type=int, default=100, metavar="N",
        help="samples of the plot of states, 0 for none (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-sage", action="store_true",
        help="measure the thresholds of SAGE's Think instead, on --samples prompts, and keep them in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-sinks", action="store_true",
        help="measure which places of images attract attention anyway instead, and keep that in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-flags", action="store_true",
        help="choose the thresholds of the flags instead, on --samples questions with clean and noisy pictures, measure how "
        "often they raise each on right and on wrong answers, and keep both in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-surprise", action="store_true",
        help="measure how surprising clean text contexts are instead, the bound of steering 'auto' by surprise, and keep it "
        "in MODEL",
    )  # fmt: skip
    parser.add_argument("--markdown", metavar="FILE", help="with --calibrate-flags: write its report here")
    parser.add_argument("--json", metavar="FILE", help="with reliability: write the votes here")
    parser.set_defaults(func=guarded(lambda arguments: _run(arguments, defaults)))


def _run(arguments: argparse.Namespace, defaults: Defaults) -> int:
    measured = next((part for part in _CALIBRATIONS if getattr(arguments, f"calibrate_{part}")), None)
    if arguments.part != "reliability":
        if arguments.json:
            raise ValueError(
                "--json goes with 'probe reliability'; a probe's numbers are in the report.json of --report"
            )
        if arguments.markdown and measured != "flags":
            raise ValueError("--markdown goes with --calibrate-flags; a probe's report is in the folder of --report")
    model, data = ModelOptions.of(arguments, defaults), Data.of(arguments, defaults)
    if arguments.part == "reliability":
        from probes.vector import reliability

        reliability.run(
            model, data, arguments.samples, None if arguments.json is None else Path(arguments.json), arguments.quiet
        )
    elif measured is not None:
        from probes.calibration import run

        markdown = None if arguments.markdown is None else Path(arguments.markdown)
        run.run(
            run.CalibrationOptions(
                measured, model, data, arguments.samples, arguments.replace, markdown, arguments.quiet
            )
        )
    else:
        from probes.vector import run as probe

        probe.run(probe.ProbeOptions.of(arguments, defaults))
    return 0
