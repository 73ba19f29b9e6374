"""Code that the server's commands share: settings as flags, and tables."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

from typer import Option

from probes.harness.options import flag
from server.settings import Settings

Config = Annotated[str | None, Option(metavar="FILE", help="TOML file with settings")]

PANELS = {
    "model": "The model", "slots": "The engine", "replicas": "Several replicas", "max_body": "Limits on a request",
    "host": "Access", "journal": "The journal of answers", "graceful_timeout": "The process",
}  # fmt: skip
"""Panels of --help by their first setting."""
OFF = "no_"
NAMES = {"api_keys": "api-key"}
"""Flags whose names differ from those of their fields."""


def settings_flags() -> list[inspect.Parameter]:
    """Return a flag for each setting; a flag that is not given is None, so that other sources apply.

    A switch has two flags, of which --help shows the one that changes the default.
    """
    flags, panel = [], ""
    for name, field in Settings.model_fields.items():
        panel = PANELS.get(name, panel)
        if get_origin(field.annotation) is dict:
            continue  # tables, which only the file has
        option = partial(Option, rich_help_panel=panel, show_default=False)
        default: Any = "the embedded model" if name == "model" else field.get_default(call_default_factory=True)
        written = name.replace("_", "-")
        if bool in (field.annotation, *get_args(field.annotation)):
            on = option(f"--{written}", hidden=default is True, help=field.description)
            what = re.split("[:,(]", str(field.description))[0].strip()  # drops the explanation
            off = option(f"--no-{written}", hidden=default is False, help=f"do not {what}")
            flags += [flag(name, bool, on, False), flag(OFF + name, bool, off, False)]
            continue
        shown = " ".join(default) if isinstance(default, tuple) else default
        text = field.description if shown in (None, "") else f"{field.description} (default: {shown})"
        metavar, kind = name.split("_")[-1].upper(), get_origin(field.annotation)
        taken: Any = list[str] | None if kind is tuple else field.annotation if kind is Literal else str | None
        metavar = metavar.rstrip("S") if kind is tuple else metavar
        flags.append(flag(name, taken, option(f"--{NAMES.get(name, written)}", help=text, metavar=metavar)))
    return flags


def given_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a command line gives; None and False were not given."""
    said = {name: value for name, value in flags.items() if value is not None and value is not False}
    return {name.removeprefix(OFF): False if name.startswith(OFF) else value for name, value in said.items()}


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
