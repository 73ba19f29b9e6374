"""`helmsight eval guard`: a guard's effect against never and always applying its intervention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import VECTOR, Defaults, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.alarm.guard.run import GuardOptions

NOISES = [0.0, 50.0, 100.0, 150.0]


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    when: Annotated[
        list[str] | None,
        Option(metavar="CONDITION", help="a condition such as alarm, alarm=false or 'focus_share<.5' (default: alarm)"),
    ] = None,
    match: Annotated[str, Option(help="any: one condition is enough; all: all must hold")] = "any",
    then: Annotated[
        str, Option(metavar="NAME", help="the intervention: a condition's name, or NAME=JSON as in an API request")
    ] = "SAGE",
    vector: Annotated[str, Option(metavar="NAME", help="vector of the conditions 'toward ...'")] = VECTOR,
    data: Annotated[
        str | None,
        sample_option(
            metavar="FILE", help="JSON Lines with images, question, answer, part (default: those of the demo world)"
        ),
    ] = None,
    noise: Annotated[
        list[float],
        sample_option(
            metavar="SD...",
            help="standard deviations of the noise on the demo world's images, used in turn, on the scale of 0 to 255",
        ),
    ] = NOISES,
) -> GuardOptions:
    from probes.alarm.guard.run import GuardOptions

    return GuardOptions.of(
        when or ["alarm"], match, then, vector, defaults.vectors, data, tuple(noise), defaults.draw.get("alarm")
    )


BENCHMARK = Benchmark(
    name="guard",
    help="wrong answers that a guard catches and mends, right ones that it breaks, and its cost",
    description="Ask questions whose answers can be checked, plainly and with an intervention. Compare three policies on "
    "the same answers: never the intervention, always, and the guard's: where the plain answer meets a condition on its "
    "readouts, the other one is kept if it meets none.",
    limit=400,
    options=_options,
    run=run_of("probes.alarm.guard.run"),
    unit="questions",
)
"""The benchmark."""
