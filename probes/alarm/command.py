"""`helmsight eval alarm`: the numbers beside an answer that show that it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import Defaults, file_option, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.alarm.run import AlarmOptions

NOISES = [0.0, 50.0, 100.0, 150.0]


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
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
            help="standard deviations of the noise on the demo world's images, used in turn, on the scale of 0 to 255, "
            "so that the model gives right and wrong answers",
        ),
    ] = NOISES,
    keep: Annotated[
        bool,
        file_option("--keep", help="save the alarm with the model's thresholds, for the readout 'alarm'"),
    ] = False,
    replace: Annotated[bool, file_option("--replace", help="replace a saved alarm")] = False,
    from_journal: Annotated[
        bool,
        sample_option(
            "--from-journal",
            help="ask nothing: choose the threshold of the model's alarm from answers that the journal says to be right or "
            "wrong",
        ),
    ] = False,
    journal: Annotated[
        str | None, sample_option(metavar="PATH|URL", help="the journal to read (default: that of the settings)")
    ] = None,
    since: Annotated[
        str | None, sample_option(metavar="TIME", help="use answers of the journal since then: 2026-11-21, 7d")
    ] = None,
) -> AlarmOptions:
    from probes.alarm.run import AlarmOptions, FromJournal, check_keep

    if keep:
        check_keep(setup)
    stored = None
    if from_journal:
        if "journal" not in defaults.draw:
            raise ValueError("--from-journal needs the server's part of helmsight")
        if data is not None:
            raise ValueError("--from-journal and --data are mutually exclusive")
        stored = FromJournal(defaults.draw["journal"], journal, since)
    elif journal is not None or since is not None:
        raise ValueError("--journal and --since need --from-journal")
    return AlarmOptions(data, tuple(noise), defaults.draw.get("alarm"), keep, replace, stored)


BENCHMARK = Benchmark(
    name="alarm",
    help="find the numbers beside an answer that show that it is wrong",
    description="Ask questions whose answers can be checked. Measure how well each number that is read beside an answer, "
    "and a logistic combination of them, separates wrong answers from right ones.",
    limit=1200,
    options=_options,
    run=run_of("probes.alarm.run"),
    unit="questions",
)
