"""`helmsight reproduce`: every table and figure of the four papers in one report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from probes.harness.loading.flags import words_of
from probes.harness.options import (
    ModelOptions,
    Quiet,
    check_writable,
    file_option,
    goes_on,
    log_warnings,
)

INTERRUPTED = 130
"""The exit status of a command after Ctrl-C, as in Typer."""


def reproduce(
    context: typer.Context,
    paper: Annotated[
        Literal["mp", "ivm", "sap", "spd"] | None,
        Option(help="only the rows of this paper: modality preference, implicit misunderstanding, MM-SAP, SPD-Faith"),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="use few samples: minutes instead of an hour")] = False,
    out: Annotated[
        Path,
        file_option(metavar="DIR", help="folder for the report and the runs, which resume from their kept answers"),
    ] = Path("build/reproduce"),
    jobs: Annotated[
        int | None,
        Option(
            min=1,
            help="parallel runs (default: one per processor, at most 4; one with --model)",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
    model: str | None = None,
    **loading: Any,
) -> None:
    """Run what the papers' tables and figures need, and report for each whether its finding appears.

    Run it again after an interruption to continue.
    """
    from probes.answering.versions import versions
    from probes.reproduce.parallel import MOST, processors
    from probes.reproduce.report import report
    from probes.reproduce.run import chosen, reproduce

    log_warnings()
    ModelOptions.of(context.obj, model, **loading).check()
    check_writable(out)

    defaults = replace(context.obj, engines={})

    def command(words: Any) -> None:
        status = context.find_root().command.main(list(words), standalone_mode=False, obj=defaults)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise ValueError(f"it ended with status {status}")

    if jobs is None:
        jobs = 1 if model is not None else min(processors(), MOST)
    with goes_on():
        outcomes, runs = reproduce(
            chosen(paper),
            out / ("quick" if quick else "full"),
            command,
            model=model,
            loading=words_of(loading),
            quick=quick,
            quiet=quiet,
            jobs=jobs,
        )
    if runs and all(run.report is None for run in runs.values()):
        raise ValueError(f"no run completed, so there is no report: {next(iter(runs.values())).error}")
    about = {"model": model or "the embedded ones", "samples": "few" if quick else "all", "versions": versions()}
    page = report(about, outcomes, runs)
    page.write(out, {"about": about, "rows": [outcome.to_json() for outcome in outcomes]})
    counts = {
        verdict: sum(outcome.verdict == verdict for outcome in outcomes)
        for verdict in {outcome.verdict for outcome in outcomes}
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print(f"report: {out / 'report.html'}")
    if any(run.report is None for run in runs.values()):
        raise typer.Exit(1)
