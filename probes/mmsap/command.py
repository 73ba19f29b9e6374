"""`helmsight eval mm-sap`: whether a model knows the limits of what it can see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import VECTOR, Defaults, Names, Texts, sample_option
from probes.harness.session import Setup

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
        str | None,
        sample_option(metavar="DIR", help="folder of the images of --data (default: the folder of its files)"),
    ] = None,
    vector: Annotated[str, Option(metavar="NAME|FILE", help="steering vector to use")] = VECTOR,
    runs: Annotated[
        int,
        Option(
            min=1,
            metavar="N",
            help="number of times that each question is asked, each with another order of its options",
        ),
    ] = 5,
    conditions: Names = None,
    condition: Texts = None,
) -> SapOptions:
    from probes.harness.conditions import Wanted
    from probes.mmsap.run import SapOptions
    from steering import RefusalPrompt

    conditions_wanted = Wanted.of(conditions, condition, defaults.vectors, {"refusal prompt": (RefusalPrompt(),)})
    return SapOptions(replace(conditions_wanted, vector=vector), runs, data, images, defaults.draw.get("mm-sap"))


BENCHMARK = Benchmark(
    name="mm-sap",
    help="MM-SAP: refusals of what a model cannot see, and answers to what it knows",
    description="Ask questions of three kinds, each with a refusal among its options: what any model can see, what needs "
    "knowledge, and what no image tells. The model answers plainly, with the refusal prompt, steered, with SAGE and "
    "with the contrastive decoders; each is compared with its plain answers to the same questions.",
    limit=300,
    options=_options,
    run=run_of("probes.mmsap.run"),
    unit="questions",
)
