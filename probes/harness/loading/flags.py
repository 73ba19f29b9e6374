"""Settings as flags of the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from typer import Option

from probes.harness.loading.settings import ModelSettings
from probes.harness.options import PANEL, Slots, Threads, flag

OFF = "no_"
EMBEDDED = "the embedded model"
"""The default model, as --help names it."""


def loading_flags() -> list[inspect.Parameter]:
    """Return the flags that say which model is loaded, and how."""
    return flags_of_settings(ModelSettings, {"model": PANEL})


def model_flags(named: bool = True) -> list[inspect.Parameter]:
    """Return the flags of a command that runs a model in its own process; `ModelOptions.of` takes what they are given.

    Without `named` they lack `--model`, for a command whose argument names it.
    """
    return [
        *(flag for flag in loading_flags() if named or flag.name != "model"),
        inspect.Parameter("threads", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Threads),
        inspect.Parameter("slots", inspect.Parameter.KEYWORD_ONLY, default=32, annotation=Slots),
    ]


def flags_of_settings(
    settings: type[BaseModel], panels: Mapping[str, str], names: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """Return a flag for each setting; a flag that is not given is None, so that other sources apply.

    A switch has two flags, of which --help shows the one that changes the default. panels: those of --help, by their first
    setting. names: flags whose names differ from those of their fields.
    """
    flags, panel = [], ""
    for name, field in settings.model_fields.items():
        panel = panels.get(name, panel)
        if get_origin(field.annotation) is dict:
            continue  # tables, which only the file has
        option = partial(Option, rich_help_panel=panel, show_default=False)
        default: Any = EMBEDDED if name == "model" else field.get_default(call_default_factory=True)
        written = name.replace("_", "-")
        if bool in (field.annotation, *get_args(field.annotation)):
            on = option(f"--{written}", hidden=default is True, help=field.description)
            description = re.split("[:,(]", str(field.description))[0].strip()  # drops the explanation
            off = option(f"--no-{written}", hidden=default is False, help=f"do not {description}")
            flags += [flag(name, bool, on, False), flag(OFF + name, bool, off, False)]
            continue
        default_text = " ".join(default) if isinstance(default, tuple) else default
        text = field.description if default_text in (None, "") else f"{field.description} (default: {default_text})"
        metavar, kind = name.split("_")[-1].upper(), get_origin(field.annotation)
        annotation: Any = list[str] | None if kind is tuple else field.annotation if kind is Literal else str | None
        metavar = metavar.rstrip("S") if kind is tuple else metavar
        flags.append(
            flag(name, annotation, option(f"--{(names or {}).get(name, written)}", help=text, metavar=metavar))
        )
    return flags


def given_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a command line gives; None and False were not given."""
    set_flags = {name: value for name, value in flags.items() if value is not None and value is not False}
    return {name.removeprefix(OFF): False if name.startswith(OFF) else value for name, value in set_flags.items()}


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that give the same settings."""
    words = []
    for name, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *(() if value is True else (str(value),))]
    return words
