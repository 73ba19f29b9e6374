"""`helmsight eval sage`: existence questions and differences of two pictures, with SAGE's stages."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from probes.harness.benchmark import Benchmark, Findings
from probes.harness.options import Defaults, positive
from probes.harness.session import Session

if TYPE_CHECKING:
    from probes.sage.run import SageOptions


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=positive, metavar="N", help="pairs of pictures (default: as many as questions)")
    parser.add_argument(
        "--conditions",
        nargs="+",
        metavar="NAME",
        help="only these beside the baseline: names, or patterns such as 'SAGE*'",
    )
    parser.add_argument(
        "--condition",
        action="append",
        metavar="NAME=JSON",
        help='one more, as the API takes it: \'strong={"sage": {"see": {"alpha": 0.3}}}\' (repeatable)',
    )
    parser.add_argument("--sweep", action="store_true", help="also each stage alone with several settings")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SD",
        help="noise on the demo world's pictures, standard deviation on the scale of 0 to 255 (default none)",
    )  # fmt: skip
    parser.add_argument("--pope", nargs="+", metavar="FILE", help="POPE's question files in place of the demo world")
    parser.add_argument("--images", metavar="DIR", help="the COCO images of --pope")


def _options(arguments: argparse.Namespace, defaults: Defaults) -> SageOptions:
    from probes.sage.run import SageOptions

    return SageOptions.of(arguments, defaults)


def _run(options: SageOptions, session: Session) -> Findings:
    from probes.sage.run import run

    return run(options, session)


BENCHMARK = Benchmark(
    name="sage",
    help="SAGE stage by stage: existence questions and differences of two pictures",
    description="Ask held-out questions of the demo world, or POPE's, plainly, with SAGE's stages, one more at a time, and "
    "with the contrastive decoders that the paper compares it with; each is compared with the plain answers to the same "
    "samples.",
    limit=500,
    add_flags=_add_flags,
    options=_options,
    run=_run,
    unit="existence questions",
)
