"""A benchmark as the command line sees it: its flags, its options, and how it runs on the harness."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from probes.harness.bootstrap import check_statistics
from probes.harness.loading.flags import model_flags
from probes.harness.options import (
    SAID,
    Command,
    ModelOptions,
    Quiet,
    Seed,
    file_option,
    flag,
    flags_of,
    goes_on,
    log_warnings,
    model_option,
    sample_option,
    with_flags,
)
from probes.harness.session import Session, Setup

if TYPE_CHECKING:
    from probes.reporting.report import Report
    from probes.reporting.tables import Summary

Options = TypeVar("Options")

BaseUrl = Annotated[
    str | None,
    model_option(
        metavar="URL",
        help="use this OpenAI-compatible server instead of a model in this process; --model names its model, the "
        "variable OPENAI_API_KEY its key",
    ),
]
Json = Annotated[Path | None, file_option(metavar="FILE", help="also write the conditions' scores to this file")]
OUT = "folder for the report and the answers that an interrupted run resumes from"
Markdown = Annotated[Path | None, file_option(metavar="FILE", help="also write the report to this file")]


@dataclass(frozen=True)
class Findings:
    """The results of a run.

    `about` describes the run, `conditions` holds the scores by condition and `more` everything else: together they are
    report.json. Without a `summary` the report itself is printed.
    """

    page: Report
    about: Mapping[str, Any]
    conditions: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    summary: Summary | None = None


@dataclass(frozen=True)
class Benchmark(Generic[Options]):
    """A benchmark and its command-line options.

    limit: the default number of `unit` that are asked (--limit). options: turns the keyword arguments, which are the
    benchmark's own flags as Typer knows them, into the options of a run, or raises ValueError, before a server is asked or a
    model loaded. run: asks and scores.
    """

    name: str
    help: str
    description: str
    limit: int
    options: Callable[..., Options]
    run: Callable[[Options, Session], Findings]
    unit: str = "samples"


def run_of(module: str) -> Callable[[Any, Session], Findings]:
    """Return the `run` of a module, which takes seconds to import and is imported once it is called."""
    return lambda options, session: import_module(module).run(options, session)


def register(app: typer.Typer, benchmark: Benchmark) -> None:
    """Add the benchmark's command to the app."""

    def command(
        context: typer.Context,
        limit: int,
        out: Path,
        seed: Seed = 0,
        quiet: Quiet = False,
        base_url: BaseUrl = None,
        json: Json = None,
        markdown: Markdown = None,
        **arguments: Any,
    ) -> None:
        check_statistics()  # before torch is imported, which takes seconds
        log_warnings()
        own_options = {flag.name: arguments.pop(flag.name) for flag in own_flags}
        model_options = ModelOptions.of(context.obj, **arguments)
        setup = Setup(model_options, limit, seed, quiet, out, base_url, json, markdown)
        options = benchmark.options(setup, context.obj, **own_options)
        setup.check()
        _check_whose(setup.out, benchmark.name)
        with goes_on():
            session = Session(setup)
            _write(benchmark.name, benchmark.run(options, session), session, context.meta[SAID])

    own_flags = flags_of(benchmark.options)
    flags = [
        flag("limit", int, sample_option(min=1, metavar="N", help=benchmark.unit), benchmark.limit),
        flag("out", Path, file_option(metavar="DIR", help=OUT), Path("build", benchmark.name)),
        *model_flags(),
        *own_flags,
    ]
    text = f"{benchmark.description} Run it again after an interruption to continue."
    app.command(benchmark.name, cls=Command, short_help=benchmark.help, help=text)(with_flags(command, flags))


def _check_whose(folder: Path, name: str) -> None:
    """Raise ValueError if a folder holds the report of another benchmark."""
    try:
        about = json.loads((folder / "report.json").read_text())["about"]
        benchmark_there = about.get("benchmark", name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if benchmark_there != name:
        raise ValueError(f"--out {folder} holds the report of 'eval {benchmark_there}'; choose another folder")


def _write(name: str, findings: Findings, session: Session, command_line: str) -> None:
    """Write the files of a run, with what was left out and the command that requested it, and print its results."""
    from steering.files import write_atomically

    setup, lacks = session.setup, list(dict.fromkeys(session.lacks))
    about = {"benchmark": name, "command": command_line, **findings.about, **({"lacks": lacks} if lacks else {})}
    if lacks:
        findings.page.heading("What was left out")
        for text in lacks:
            findings.page.text(text)
    findings.page.text(f"Made by\n\n    {command_line}")
    findings.page.write(setup.out, {"about": about, "conditions": findings.conditions, **findings.more})
    if setup.json is not None:
        write_atomically(setup.json, (json.dumps(findings.conditions, indent=2) + "\n").encode())
    if setup.markdown is not None:
        write_atomically(setup.markdown, findings.page.markdown().encode())
    if findings.summary is None:
        print(findings.page.markdown())
    else:
        findings.summary.show()
    print(f"report: {setup.out / 'report.html'}")
