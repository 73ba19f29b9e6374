"""Code that the server's commands share: settings as flags, and tables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from typer import Option

from probes.harness.loading.flags import flags_of_settings, given_of
from server.settings import Settings

Config = Annotated[str | None, Option(metavar="FILE", help="TOML file with settings")]

PANELS = {
    "model": "The model", "slots": "The engine", "replicas": "Several replicas", "max_body": "Limits on a request",
    "host": "Access", "journal": "The journal of answers", "graceful_timeout": "The process",
}  # fmt: skip
"""Panels of --help by their first setting."""
NAMES = {"api_keys": "api-key"}
"""Flags whose names differ from those of their fields."""


def settings_flags() -> list[inspect.Parameter]:
    """Return a flag for each setting."""
    return flags_of_settings(Settings, PANELS, NAMES)


def settings_of(config: str | None, **flags: Any) -> Settings:
    """Return the settings of a command line."""
    from server.process.sources import load_settings

    return load_settings(given_of(flags), config=config)


def show(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with a header; non-texts are aligned right, None is "-".

    Nothing is cut off if the output is not a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        numbers = any(not isinstance(row[index], str | None) for row in rows)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
