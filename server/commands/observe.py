"""`helmsight observe`: answers of another engine with the same weights, read from its logs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer
from typer import Argument, Option

from probes.harness.options import Command, Quiet, log_warnings, with_flags
from server.commands.batch import AtOnce, BaseUrl, Pictures, Rate, Timeout, connected, model_flags
from server.commands.options import Config


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("observe", cls=Command)(with_flags(observe, model_flags()))


def observe(
    answers: Annotated[Path, Argument(metavar="ANSWERS.jsonl", help="the answers, in OpenAI's batch format or by --map")],
    requests: Annotated[Path | None, Option(
        metavar="FILE", help="their requests, if the lines of the answers do not hold them (vllm run-batch)",
    )] = None,
    map: Annotated[list[str] | None, Option(
        "--map", metavar="NAME=PATH...", help="where a line holds id, request, messages, response, answer, token_ids, "
        "finish_reason, prompt_tokens or completion_tokens: messages=input.messages answer=output.0.text",
    )] = None,
    follow: Annotated[bool, Option("--follow", help="wait for further lines, also of a file that takes its place")] = False,
    share: Annotated[float, Option(min=0, max=1, metavar="SHARE", help="share of the answers that is read")] = 1.0,
    seed: Annotated[int, Option(help="seed of the choice of that share")] = 0,
    limit: Annotated[int | None, Option(min=1, metavar="N", help="read at most about so many answers")] = None,
    readouts: Annotated[list[str] | None, Option(metavar="NAME...", help="the readouts (default: the cheap ones)")] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="write a line of JSON for each answer to this file")] = None,
    metrics_file: Annotated[Path | None, Option(
        metavar="FILE", help="write metrics to this file, for Prometheus' textfile collector",
    )] = None,
    metrics_port: Annotated[int | None, Option(
        min=0, max=65_535, metavar="PORT", help="serve metrics on this port of 127.0.0.1",
    )] = None,
    state: Annotated[Path | None, Option(
        metavar="FILE", help="keep the place that was reached in this file (default: ANSWERS.jsonl.observed)",
    )] = None,
    pictures: Pictures = None,
    base_url: BaseUrl = None,
    at_once: AtOnce = None,
    rate: Rate = None,
    timeout: Timeout = 300.0,
    quiet: Quiet = False,
    config: Config = None,
    **serve_flags: Any,
) -> None:  # fmt: skip
    """Read answers that another engine gave with the same weights: each is forced here, and its readouts are kept.

    They go into the journal, unless it is off, and where the options say. Run it again to continue.
    """
    log_warnings()
    from server.observe.run import ObserveOptions
    from server.observe.run import observe as run
    from server.observe.served import FieldPaths

    options = ObserveOptions(
        answers=answers,
        requests=requests,
        pictures=pictures,
        paths=FieldPaths(map or ()),
        readouts=None if readouts is None else tuple(readouts),
        follow=follow,
        share=share,
        seed=seed,
        at_once=at_once,
        rate=rate,
        limit=limit,
        state=state,
        out=out,
        metrics_file=metrics_file,
        metrics_port=metrics_port,
        quiet=quiet,
    )
    options.check()
    with connected("observe", base_url, at_once, timeout, config, serve_flags) as transport, _until_told() as stop:
        report = run(options, transport, stop)
    print(report)
    if report.reason is not None:
        print(f"helmsight: the first answer that differs or was not read: {report.reason}")


@contextmanager
def _until_told() -> Iterator[Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that running answers are kept and the place is saved."""
    stop = Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
