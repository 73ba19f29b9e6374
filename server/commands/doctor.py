"""`helmsight doctor`: a check of everything that a server depends on, on one page."""

from __future__ import annotations

import json as jsons
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Option

from probes.harness.loading.flags import given_of
from probes.harness.options import Command, with_flags
from server.commands.options import Config, settings_flags

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    flagged = with_flags(doctor, settings_flags())
    app.command("doctor", cls=Command)(flagged)


def doctor(
    load: Annotated[
        bool, Option("--load/--no-load", help="load the model and have it check itself", show_default=False)
    ] = True,
    json: Annotated[bool, Option("--json", help="write the findings as JSON")] = False,
    config: Config = None,
    **serve_flags: Any,
) -> None:
    """Check everything that a server with these settings depends on.

    These are packages, device, threads, model, vectors, journal and port. The exit status is 1 if there is a problem. Flags
    are those of 'helmsight serve'.
    """
    from rich.console import Console
    from rich.text import Text

    from server.commands.findings import examine

    console, findings = Console(soft_wrap=True, highlight=False), []
    for finding in examine(given_of(serve_flags), os.environ, config, load):
        findings.append(finding)
        if not json:
            console.print(
                Text.assemble((f"{finding.state:8}", STYLES[finding.state]), f" {finding.part:9} {finding.said}")
            )
            if finding.advice is not None:
                console.print(Text(f"{'':18} -> {finding.advice}"))
    failed = any(finding.state == "problem" for finding in findings)
    if json:
        print(jsons.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    raise typer.Exit(int(failed))
