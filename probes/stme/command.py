"""`helmsight eval stme`: whether answers about several pictures rest on the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from probes.harness.benchmark import Benchmark, Findings
from probes.harness.options import Defaults, Names, Noise, Texts, sample_option
from probes.harness.session import Session, Setup

if TYPE_CHECKING:
    from probes.stme.run import StmeOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    data: Annotated[
        list[str] | None, sample_option(metavar="FILE...", help="STME's JSON files in place of the demo world")
    ] = None,
    images: Annotated[str | None, sample_option(metavar="DIR", help="the pictures of --data")] = None,
    choices: Annotated[
        str | None, sample_option(metavar="DIR", help="MileBench, whose files hold the options of --data")
    ] = None,
    full_size: Annotated[
        bool, sample_option("--full-size", help="do not scale pictures of --data down, as the authors did")
    ] = False,
    tasks: Annotated[list[str] | None, sample_option(metavar="TASK...", help="only samples of these tasks")] = None,
    noise: Noise = 0.0,
    shuffles: Annotated[
        int, Option(min=0, metavar="N", help="further orders of its pictures in which every sample is asked")
    ] = 5,
    scoring: Annotated[
        Literal["published", "robust"] | None,
        Option(
            help="the scoring of answers: the authors' matching, or one that reads more kinds of answers "
            "(default: published with --data)"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, Option(min=1, metavar="N", help="most tokens of an answer (default: 24, with --data 256)")
    ] = None,
    conditions: Names = None,
    condition: Texts = None,
) -> StmeOptions:
    from probes.harness.conditions import Wanted
    from probes.stme.run import StmeOptions

    wanted = Wanted.of(["baseline"] if conditions is None else conditions, condition, defaults.vectors)
    return StmeOptions(
        wanted, shuffles, scoring, max_tokens, noise, tuple(data or ()), images, choices, full_size,
        frozenset(tasks or ()), defaults.draw.get("stme"),
    )  # fmt: skip


def _run(options: StmeOptions, session: Session) -> Findings:
    from probes.stme.run import run

    return run(options, session)


BENCHMARK = Benchmark(
    name="stme",
    help="attention accuracy: whether answers about several pictures rest on the right one",
    description="Ask held-out questions of the demo world about several pictures, or STME's, of which one holds the answer: "
    "whether the answer is right, and whether the model looked at that picture. Every sample is also asked in other orders "
    "of its pictures, for the picture itself, without pictures, and with the one that was looked at hidden.",
    limit=180,
    options=_options,
    run=_run,
)
