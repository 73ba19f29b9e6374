"""`helmsight eval sage`."""

from __future__ import annotations

import argparse
import fnmatch
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from probes.commands.common import Defaults, add_model, engine_of, guarded, positive, write_json

if TYPE_CHECKING:
    from probes.sage.samples import Difference, Existence


def register(benchmarks: Any, defaults: Defaults) -> None:
    """Add the benchmark."""
    parser = benchmarks.add_parser(
        "sage",
        help="SAGE stage by stage: existence questions and differences of two pictures",
        description="Ask held-out questions of the demo world, or POPE's, plainly, with SAGE's stages, one more at a time, "
        "and with the contrastive decoders that the paper compares it with; each is compared with the plain answers to the "
        "same samples.",
    )
    add_model(parser, defaults)
    parser.add_argument(
        "--limit", type=positive, default=500, metavar="N", help="existence questions (default %(default)s)"
    )
    parser.add_argument("--pairs", type=positive, metavar="N", help="pairs of pictures (default: as many as questions)")
    parser.add_argument(
        "--conditions",
        nargs="+",
        metavar="NAME",
        help="only these beside the baseline: names, or patterns such as 'SAGE*'",
    )
    parser.add_argument("--sweep", action="store_true", help="also each stage alone with several settings")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SD",
        help="noise on the demo world's pictures, standard deviation on the scale of 0 to 255 (default none)",
    )  # fmt: skip
    parser.add_argument("--pope", nargs="+", metavar="FILE", help="POPE's question files in place of the demo world")
    parser.add_argument("--images", metavar="DIR", help="the COCO images of --pope")
    parser.add_argument("--json", metavar="FILE", help="write the scores here")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables here")
    parser.set_defaults(func=guarded(_run, defaults))


def _run(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from probes.answering.engine import InProcess
    from probes.harness.comparison import BASELINE
    from probes.sage.evaluate import evaluate
    from probes.sage.report import report
    from probes.sage.stages import stages
    from steering.files import write_atomically

    existence, differences, categories = _samples(arguments, defaults)
    conditions = stages(arguments.sweep)
    wanted = {BASELINE}
    for pattern in arguments.conditions or ["*"]:
        if not (found := fnmatch.filter(conditions, pattern)):
            raise ValueError(f"--conditions: unknown {pattern}; there are {', '.join(conditions)}")
        wanted.update(found)
    conditions = {name: one for name, one in conditions.items() if name in wanted}
    engine = engine_of(arguments)
    scores = evaluate(InProcess(engine), conditions, existence, differences, categories, arguments.quiet)
    page = report(
        f"SAGE on {engine.mllm.name}: {len(existence)} existence questions, {len(differences)} pairs of pictures"
        + (f" with noise {arguments.noise:g}" if arguments.noise else "")
        + f", seed {arguments.seed}",
        scores,
    )
    if arguments.json:
        write_json(arguments.json, scores)
    if arguments.markdown:
        write_atomically(arguments.markdown, page.markdown().encode())
    print(page.markdown())
    return 0


def _samples(
    arguments: argparse.Namespace, defaults: Defaults
) -> tuple[Sequence[Existence], Sequence[Difference], Sequence[str]]:
    """POPE's questions where files are given, else the demo world's, with its pairs and the names of its objects."""
    if not arguments.pope:
        assert defaults.faithfulness is not None
        return defaults.faithfulness(
            arguments.limit, arguments.pairs or arguments.limit, arguments.seed, arguments.noise
        )
    from probes.sage import pope

    if not arguments.images:
        raise ValueError("--pope needs --images, the folder of COCO val2014")
    found = pope.load(arguments.pope, arguments.images)
    random.Random(arguments.seed).shuffle(found)
    return found[: arguments.limit], [], ()
