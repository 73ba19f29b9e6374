"""`helmsight eval mm-sap`: whether a model knows the limits of what it can see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.harness.benchmark import Benchmark, Findings
from probes.harness.options import VECTOR, Defaults, Names, Texts, sample_option
from probes.harness.session import Session, Setup

if TYPE_CHECKING:
    from probes.mmsap.run import SapOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    data: Annotated[
        str | None,
        sample_option(
            metavar="PATH", help="MM-SAP's questions: a folder or a JSON file (default: those of the demo world)"
        ),
    ] = None,
    images: Annotated[
        str | None, sample_option(metavar="DIR", help="the images of --data (default: where its files lie)")
    ] = None,
    vector: Annotated[str, Option(metavar="NAME|FILE", help="vector to steer with")] = VECTOR,
    runs: Annotated[
        int, Option(min=1, metavar="N", help="times that each question is asked, with its options in another order")
    ] = 5,
    conditions: Names = None,
    condition: Texts = None,
) -> SapOptions:
    from probes.harness.conditions import Wanted
    from probes.mmsap.run import SapOptions
    from steering import RefusalPrompt

    wanted = Wanted.of(conditions, condition, defaults.vectors, {"refusal prompt": (RefusalPrompt(),)})
    return SapOptions(replace(wanted, vector=vector), runs, data, images, defaults.draw.get("mm-sap"))


def _run(options: SapOptions, session: Session) -> Findings:
    from probes.mmsap.run import run

    return run(options, session)


BENCHMARK = Benchmark(
    name="mm-sap",
    help="MM-SAP: whether a model refuses what it cannot see, and answers what it knows",
    description="Ask questions of three kinds, each with a refusal among its options: what any model can see, what needs "
    "knowledge, and what no picture tells. Asked plainly, with the refusal prompt, steered, with SAGE and with the "
    "contrastive decoders; each is compared with the plain answers to the same questions.",
    limit=300,
    options=_options,
    run=_run,
    unit="questions",
)
