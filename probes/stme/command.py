"""`helmsight eval stme`: whether answers about several pictures rest on the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import Defaults, Names, Noise, Texts, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.stme.run import StmeOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    data: Annotated[
        list[str] | None, sample_option(metavar="FILE...", help="STME's JSON files; the demo world by default")
    ] = None,
    images: Annotated[str | None, sample_option(metavar="DIR", help="folder of the images of --data")] = None,
    choices: Annotated[
        str | None, sample_option(metavar="DIR", help="folder of MileBench, whose files hold the options of --data")
    ] = None,
    full_size: Annotated[
        bool, sample_option("--full-size", help="do not scale down the images of --data, as the authors did")
    ] = False,
    tasks: Annotated[list[str] | None, sample_option(metavar="TASK...", help="use only samples of these tasks")] = None,
    noise: Noise = 0.0,
    shuffles: Annotated[
        int, Option(min=0, metavar="N", help="number of further orders of its images in which each sample is asked")
    ] = 5,
    scoring: Annotated[
        Literal["published", "robust"] | None,
        Option(
            help="scoring of answers: the authors' matching, or one that understands more kinds of answers (default: "
            "published with --data)"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(min=1, metavar="N", help="largest number of tokens of an answer (default: 24, with --data 256)"),
    ] = None,
    conditions: Names = None,
    condition: Texts = None,
) -> StmeOptions:
    from probes.harness.conditions import Wanted
    from probes.stme.run import StmeOptions

    conditions_wanted = Wanted.of(["baseline"] if conditions is None else conditions, condition, defaults.vectors)
    return StmeOptions(
        conditions_wanted, shuffles, scoring, max_tokens, noise, tuple(data or ()), images, choices, full_size,
        frozenset(tasks or ()), defaults.draw.get("stme"),
    )  # fmt: skip


BENCHMARK = Benchmark(
    name="stme",
    help="attention accuracy: how often right answers rest on the right one of several images",
    description="Ask questions about several images of which one holds the answer, held-out ones of the demo world or "
    "STME's. Check the answer, and whether the model looked at that image. Each sample is also asked in other orders of "
    "its images, for the image itself, without images, and with the focused image hidden.",
    limit=180,
    options=_options,
    run=run_of("probes.stme.run"),
)
