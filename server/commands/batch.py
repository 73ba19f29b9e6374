"""`helmsight batch`: a file of requests, answered by a model in this process or by a server."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer import Argument, Option

from probes.harness.loading.flags import given_of
from probes.harness.options import Command, Quiet, goes_on, log_warnings, with_flags
from server.commands.options import Config, settings_flags, settings_of

if TYPE_CHECKING:
    from server.batches.run import BatchSummary
    from server.batches.transport import Transport

Pictures = Annotated[
    Path | None,
    Option("--images", metavar="DIR", help="folder of the pictures that requests name as files (file:cat.png)"),
]
BaseUrl = Annotated[
    str | None,
    Option(
        metavar="URL", help="send the requests to this server (key: OPENAI_API_KEY) instead of loading a model here"
    ),
]
AtOnce = Annotated[
    int | None,
    Option("--concurrency", min=1, metavar="N", help="requests at once (default: the slots, or 8 with --base-url)"),
]
Rate = Annotated[float | None, Option(min=1e-6, metavar="N", help="most requests a second (default: no limit)")]
Timeout = Annotated[
    float, Option("--timeout", min=0.001, metavar="S", help="longest wait for an answer with --base-url, in seconds")
]


PANELS = ("The model", "The engine", "Limits on a request", "The journal of answers")
"""Panels of the settings that matter where nothing listens on a port."""
SERVED_ONLY = ("engine_process", "tensor_parallel", "read_timeout", "max_vector_bytes", "max_uploaded_vectors")
"""Settings of these panels that matter to a server alone."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("batch", cls=Command)(with_flags(batch, model_flags()))


def model_flags() -> list[inspect.Parameter]:
    """Return a flag for each setting of a model that this process loads."""
    flags = [flag for flag in settings_flags() if get_args(flag.annotation)[1].rich_help_panel in PANELS]
    return [flag for flag in flags if flag.name.removeprefix("no_") not in SERVED_ONLY]


def connected(
    source: str,
    base_url: str | None,
    at_once: int | None,
    timeout: float,
    config: str | None,
    serve_flags: dict[str, Any],
) -> AbstractContextManager[Transport]:
    """Return the way to a server, or to a model that is loaded in this process.

    Journal and metrics count the answers under `source`; those of a batch are in a journal only if the command line names
    one. Raises ValueError for settings of a model beside an address.
    """
    from server.batches import transport

    flags = given_of(serve_flags)
    if base_url is not None:
        model = flags.pop("model", None)
        if flags:
            raise ValueError(
                f"--base-url leaves no use for --{next(iter(flags)).replace('_', '-')}: no model is loaded here"
            )
        return transport.remote(base_url, model, at_once or 8, timeout, source)
    if source == "batch" and "journal" not in flags:
        flags["journal"] = "off"
    settings = settings_of(config, **flags)
    from prometheus_client import disable_created_metrics
    from transformers.utils import logging as transformers_logging

    from server.process.preflight import look

    look(settings)
    disable_created_metrics()
    transformers_logging.disable_progress_bar()
    return transport.in_process(settings, source)


def batch(
    requests: Annotated[Path, Argument(metavar="IN.jsonl", help="the requests")],
    responses: Annotated[Path, Argument(metavar="OUT.jsonl", help="the responses; a run continues where it ended")],
    conditions: Annotated[Path | None, Option(
        metavar="FILE", help="TOML or JSON with sets of interventions by name; every request is answered under each",
    )] = None,
    flat: Annotated[Path | None, Option(
        "--flat", metavar="FILE", help="also write a table of all answers with their numbers: .csv or .jsonl",
    )] = None,
    pictures: Pictures = None,
    base_url: BaseUrl = None,
    at_once: AtOnce = None,
    rate: Rate = None,
    timeout: Timeout = 300.0,
    any_model: Annotated[bool, Option("--any-model", help="answer requests whatever model they name")] = False,
    replace_rows: Annotated[bool, Option("--replace", help="drop responses to other requests from OUT.jsonl")] = False,
    quiet: Quiet = False,
    config: Config = None,
    **serve_flags: Any,
) -> None:  # fmt: skip
    """Answer a file of requests in OpenAI's batch format.

    Run it again after an interruption to continue; failures that may pass are asked again.
    """
    log_warnings()
    from server.batches.run import BatchOptions, run_batch

    options = BatchOptions(
        requests=requests,
        responses=responses,
        conditions=conditions,
        table=flat,
        pictures=pictures,
        at_once=at_once,
        rate=rate,
        any_model=any_model,
        replace=replace_rows,
        quiet=quiet,
    )
    options.check()
    with goes_on(), connected("batch", base_url, at_once, timeout, config, serve_flags) as transport:
        summary = run_batch(options, transport)
    print(_summary_line(summary, responses))
    if summary.failed:
        print(f"helmsight: {summary.failed} requests failed; the first one: {summary.reason}", file=sys.stderr)
    if summary.failed and not summary.answered + summary.kept:
        raise typer.Exit(1)


def _summary_line(summary: BatchSummary, responses: Path) -> str:
    earlier = f", {summary.kept} kept from an earlier run" if summary.kept else ""
    return f"{summary.answered} answers, {summary.failed} failures{earlier}: {responses}"
