"""The settings file with every setting, its description and its default.

python -m server.commands.example > deploy/helmsight.toml
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, get_origin

from pydantic import SecretStr

from server.commands.options import PANELS
from server.encode import dumps
from server.settings import Settings

HEAD = """\
# Settings of Helmsight: helmsight serve --config FILE, or HELMSIGHT_CONFIG=FILE. Each description is followed by the
# default; remove its # to change it. Variables (HELMSIGHT_PORT) and flags (--port) take precedence over this file.
"""
PRESETS = """
# == Presets: tables of request fields, which clients select with "model": "NAME@careful" ==

# [presets.careful]
# temperature = 0
# diagnostics = true
# steering = {toward = "vision", strength = 0.5}
"""


def lines() -> Iterator[str]:
    """Yield the settings by panels, as `helmsight serve --help` shows them."""
    for name, field in Settings.model_fields.items():
        if name in PANELS:
            yield f"# == {PANELS[name]} ==\n"
        if get_origin(field.annotation) is dict:
            continue
        text, default = field.description or name, field.get_default(call_default_factory=True)
        if name == "model":  # its path differs between machines
            text, default = f"{text} (default: the embedded model)", None
        yield textwrap.fill(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield f"# {name} =" + ("\n" if default is None else f" {_written(default)}\n")


def example() -> str:
    """Return the whole file."""
    return HEAD + "\n" + "\n".join(lines()) + PRESETS


def _written(value: Any) -> str:
    """Return a value in TOML, which is the same as JSON for these."""
    return dumps(value.get_secret_value() if isinstance(value, SecretStr) else value)


if __name__ == "__main__":
    print(example(), end="")
