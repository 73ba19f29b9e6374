"""Sources of settings, read by pydantic-settings: a TOML file, HELMSIGHT_* variables, the flags of a command.

Importing this module is too slow for --help.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from server.settings import Settings, SettingsError

PREFIX = "HELMSIGHT_"
SHOWN = 64
"""Longest wrong value that an error repeats."""
EMPTY = f"{PREFIX}VECTORS"
"""The only variable with a meaning when empty: no folder."""
_PLATFORM = re.compile(r"(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))(_\w+)?")
"""Suffixes of variables that container platforms set for a service of this name."""


class Sourced(Settings, BaseSettings):
    """The settings as pydantic-settings' sources read them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)


class Environment(EnvSettingsSource):
    """HELMSIGHT_* variables; commas separate lists, and empty variables are ignored."""

    def __init__(self, environ: Mapping[str, str]):
        super().__init__(Sourced)
        ours = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
        self.env_vars = {name.lower(): text for name, text in ours.items() if text or name == EMPTY}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip())


def load_settings(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, config: str | None = None
) -> Settings:
    """Return the settings of all sources as `merged` does, after a warning of unknown variables."""
    environ = os.environ if environ is None else environ
    for name, meant in unknown(environ):
        logging.getLogger("helmsight").warning(
            "%s is not a setting%s", name, f"; did you mean {meant}?" if meant else ""
        )
    return merged(flags or {}, environ, config)


def merged(flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None) -> Settings:
    """Return the settings; flags take precedence over variables, variables over the file.

    `flags` holds only the given ones. Raises SettingsError naming setting and source.
    """
    config = config or environ.get(f"{PREFIX}CONFIG")
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    file = f"config file {config}"
    for origin, layer in (
        (file, _with_presets(_file(config), file) if config else {}),
        ("environment", Environment(environ)()),
        ("command line", flags),
    ):
        values |= layer
        source |= dict.fromkeys(layer, origin)
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0])
            reason = _reason(problem, name)
            if problem["type"] == "extra_forbidden":
                close = get_close_matches(name, Settings.model_fields, n=1)
                reason = "there is no such setting" + (f"; did you mean {close[0]!r}?" if close else "")
            lines.append(f"setting {name!r} ({source.get(name, 'default')}): {reason}")
        raise SettingsError("; ".join(lines)) from None


def _reason(problem: Any, name: str) -> str:
    """Return what a setting must be, and its value where that is short and no secret."""
    message = problem["msg"].replace("Input should", "must").removeprefix("Value error, ")
    message = re.sub(", unable to .*", "", message).replace(" tuple", " list")
    message = re.sub(r"\ba valid (?=(\w))", lambda after: "an " if after[1] in "aeiou" else "a ", message)
    value = problem["input"]
    told = problem["type"] != "value_error" and isinstance(value, str | int | float) and len(str(value)) <= SHOWN
    secret = name in Settings.model_fields and "Secret" in str(Settings.model_fields[name].annotation)
    return f"{message}; got {value!r}" if told and not secret else message


def unknown(environ: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Return each prefixed variable that is no setting, with the setting that is probably meant."""
    names = [name.upper() for name in (*Settings.model_fields, "config")]
    ours = [name.removeprefix(PREFIX) for name in sorted(environ) if name.startswith(PREFIX)]
    strange = [name for name in ours if name not in names and not _PLATFORM.fullmatch(name)]
    meant = [get_close_matches(name, names, n=1) for name in strange]
    return [(PREFIX + name, PREFIX + close[0] if close else None) for name, close in zip(strange, meant, strict=True)]


def _with_presets(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a file with `source` added to its presets."""
    presets = values.get("presets")
    if not isinstance(presets, dict):
        return values
    return values | {"presets": {name: {"fields": table, "source": source} for name, table in presets.items()}}


def _file(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if not file.is_file():  # the source would treat it as empty
        reason = "is no file" if file.exists() else "there is no such file"
        raise SettingsError(f"config file {path}: {reason}")
    try:
        return TomlConfigSettingsSource(Sourced, file)()
    except (OSError, TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path}: {error}") from error
