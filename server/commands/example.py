"""The settings file with everything that can be set, each with what it means and its default.

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
# Settings of Helmsight: helmsight serve --config FILE, or HELMSIGHT_CONFIG=FILE. Behind each description stands the
# default; take away its # to change it. A variable (HELMSIGHT_PORT) and a flag (--port) go before this file.
"""
PRESETS = """
# == Presets: tables of fields of a request, which clients ask for as "model": "NAME@careful" ==

# [presets.careful]
# temperature = 0
# diagnostics = true
# steering = {toward = "vision", strength = 0.5}
"""


def lines() -> Iterator[str]:
    """The settings by panels, as `helmsight serve --help` has them."""
    for name, field in Settings.model_fields.items():
        if name in PANELS:
            yield f"# == {PANELS[name]} ==\n"
        if get_origin(field.annotation) is dict:
            continue
        text, default = field.description or name, field.get_default(call_default_factory=True)
        if name == "model":  # which lies elsewhere on every machine
            text, default = f"{text} (default: the embedded model)", None
        yield textwrap.fill(text, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield f"# {name} =" + ("\n" if default is None else f" {_written(default)}\n")


def example() -> str:
    """The whole file."""
    return HEAD + "\n" + "\n".join(lines()) + PRESETS


def _written(value: Any) -> str:
    """A value as TOML has it, which for these is as JSON has it."""
    return dumps(value.get_secret_value() if isinstance(value, SecretStr) else value)


if __name__ == "__main__":
    print(example(), end="")
