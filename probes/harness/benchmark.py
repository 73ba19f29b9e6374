"""A benchmark as the command line knows it: its flags, its options, and how it runs on the harness."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from probes.harness.options import Defaults, add_model, guarded, positive
from probes.harness.session import Session, Setup

if TYPE_CHECKING:
    from probes.harness.report import Report
    from probes.harness.tables import Summary

Options = TypeVar("Options")


@dataclass(frozen=True)
class Findings:
    """What a run found.

    `about` is what was asked of what, `conditions` the scores by condition, `more` what else there is: all of report.json.
    Without a `summary` the report itself is printed.
    """

    page: Report
    about: Mapping[str, Any]
    conditions: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    summary: Summary | None = None


@dataclass(frozen=True)
class Benchmark(Generic[Options]):
    """A benchmark.

    limit: how many of its `unit` are asked unless --limit says so. add_flags: adds its own. options: makes of the arguments
    what the run takes, or raises ValueError, before a server is asked or a model loaded. run: asks and scores.
    """

    name: str
    help: str
    description: str
    limit: int
    add_flags: Callable[[argparse.ArgumentParser], None]
    options: Callable[[argparse.Namespace, Defaults], Options]
    run: Callable[[Options, Session], Findings]
    unit: str = "samples"


def register(subparsers: Any, benchmark: Benchmark, defaults: Defaults) -> None:
    """Add the benchmark's command."""
    parser = subparsers.add_parser(
        benchmark.name,
        help=benchmark.help,
        description=f"{benchmark.description} Run again after an interruption, it goes on where it was.",
    )
    add_model(parser, defaults)
    parser.add_argument(
        "--limit", type=positive, default=benchmark.limit, metavar="N", help=f"{benchmark.unit} (default %(default)s)"
    )
    benchmark.add_flags(parser)
    parser.add_argument(
        "--base-url", metavar="URL",
        help="ask this OpenAI-compatible server in place of a model in this process; --model then names its model, the "
        "environment's OPENAI_API_KEY its key",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", default=f"build/{benchmark.name}",
        help="folder of the report, and of the answers that a run that was stopped goes on from (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the conditions' scores here as well")
    parser.add_argument("--markdown", metavar="FILE", help="write the report here as well")
    parser.set_defaults(func=guarded(lambda arguments: _run(benchmark, arguments, defaults)))


def _run(benchmark: Benchmark, arguments: argparse.Namespace, defaults: Defaults) -> int:
    options = benchmark.options(arguments, defaults)
    setup = Setup.of(arguments, defaults)
    _write(benchmark.run(options, Session(setup)), setup)
    return 0


def _write(found: Findings, setup: Setup) -> None:
    """Write the files of a run and print what it found."""
    from steering.files import write_atomically

    found.page.write(setup.out, {"about": found.about, "conditions": found.conditions, **found.more})
    if setup.json is not None:
        write_atomically(setup.json, (json.dumps(found.conditions, indent=2) + "\n").encode())
    if setup.markdown is not None:
        write_atomically(setup.markdown, found.page.markdown().encode())
    if found.summary is None:
        print(found.page.markdown())
    else:
        found.summary.show()
    print(f"report: {setup.out / 'report.html'}")
