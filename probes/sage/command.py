"""`helmsight eval sage`: existence questions and differences between two pictures, with SAGE's stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import Defaults, Names, Noise, Texts, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.sage.run import SageOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    pairs: Annotated[
        int | None, sample_option(min=0, metavar="N", help="pairs of images (default: as many as questions)")
    ] = None,
    noise: Noise = 0.0,
    pope: Annotated[
        list[str] | None,
        sample_option(metavar="FILE...", help="POPE's question files; the demo world by default"),
    ] = None,
    images: Annotated[str | None, sample_option(metavar="DIR", help="folder of the COCO images of --pope")] = None,
    conditions: Names = None,
    condition: Texts = None,
    sweep: Annotated[bool, Option("--sweep", help="also evaluate each stage alone with several settings")] = False,
) -> SageOptions:
    from probes.harness.conditions import chosen
    from probes.sage.run import SageOptions
    from probes.sage.stages import FULL, stages

    # Other benchmarks call the condition with all stages SAGE.
    names = None if conditions is None else [FULL if name == "SAGE" else name for name in conditions]
    return SageOptions(
        chosen(stages(sweep), names, condition), pairs, noise, tuple(pope or ()), images, defaults.draw.get("sage")
    )


BENCHMARK = Benchmark(
    name="sage",
    help="SAGE stage by stage: existence questions and differences between two images",
    description="Ask held-out questions of the demo world, or POPE's: plainly, with SAGE's stages, one more at a time, "
    "and with the contrastive decoders that the paper compares it with. Each is compared with the plain answers to the "
    "same samples.",
    limit=500,
    options=_options,
    run=run_of("probes.sage.run"),
    unit="existence questions",
)
