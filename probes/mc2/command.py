"""`helmsight eval mc2`: modality preference, plain and changed, with the paper's ablations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from probes.conflicts.options import add_data
from probes.harness.benchmark import Benchmark, Findings
from probes.harness.options import Defaults
from probes.harness.session import Session
from probes.vector import VECTOR

if TYPE_CHECKING:
    from probes.mc2.run import MC2Options

KINDS = ("plain", "instruct", "chain", "shots", "steer")  # those of `mc2.evaluate`, which brings torch
CRITERIA = ("drop", "surprise")  # those of the engine, likewise
SEVERITIES = (0.3, 0.5, 0.7)
ABLATIONS = ("samples", "tasks", "strength", "latency")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument(
        "--conditions", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME",
        help=f"of {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--vector", default=VECTOR, metavar="NAME|FILE", help="vector to steer with (default %(default)s)"
    )
    parser.add_argument(
        "--strength", type=float, default=1.0,
        help="1.0 is the calibrated one (default %(default)s); --ablate strength tries strengths in published units",
    )  # fmt: skip
    parser.add_argument("--random-directions", type=int, default=0, metavar="K", help="controls of the same dose")
    parser.add_argument(
        "--ablate", nargs="+", choices=ABLATIONS, default=[], metavar="WHAT",
        help=f"also the paper's ablations, of {', '.join(ABLATIONS)} (its Tables 8 to 11)",
    )  # fmt: skip
    parser.add_argument(
        "--auto", nargs="*", choices=CRITERIA, metavar="CRITERION",
        help="also steering whose way is found by a criterion, on degraded copies of the samples (Table 12): of "
        f"{', '.join(CRITERIA)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--severity", type=float, nargs="+", default=list(SEVERITIES), metavar="S",
        help="of that degradation, 0 to 1 (nothing is left); default: " + " ".join(map(str, SEVERITIES)),
    )  # fmt: skip


def _options(arguments: argparse.Namespace, defaults: Defaults) -> MC2Options:
    from probes.mc2.run import MC2Options

    return MC2Options.of(arguments, defaults)


def _run(options: MC2Options, session: Session) -> Findings:
    from probes.mc2.run import run

    return run(options, session)


BENCHMARK = Benchmark(
    name="mc2",
    help="modality preference on conflicts, plain and changed",
    description="Ask conflicting samples in both option orders: plainly, instructed, with a chain of thought, with four "
    "solved examples, steered.",
    limit=400,
    add_flags=_add_flags,
    options=_options,
    run=_run,
)
