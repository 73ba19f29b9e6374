"""`helmsight keys add | list | revoke`: the file of named keys, which a running server reads anew when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from probes.harness.options import Command
from server.commands.options import Config, settings_of, show

if TYPE_CHECKING:
    from server.keys.named import NamedKey

DEFAULT = "~/.helmsight/keys.json"

Name = Annotated[str, Argument(help="name of the key, which journal and metrics show")]
File = Annotated[str | None, Option(metavar="FILE", help=f"default: that of the settings, or {DEFAULT}")]

app = typer.Typer(no_args_is_help=True)


def register(to: typer.Typer) -> None:
    """Add the `keys` command with its parts."""
    to.add_typer(app, name="keys")


@app.command("add", cls=Command)
def add(
    name: Name,
    role: Annotated[
        list[str] | None,
        Option(
            metavar="use|journal|vectors",
            help="what it is for: use (chats, models), journal (read it, and the metrics), vectors (upload and delete "
            "them); repeatable (default: use)",
        ),
    ] = None,
    rate: Annotated[
        str | None, Option(metavar="N/TIME", help="chats in a time, such as 60/minute (default: any)")
    ] = None,
    concurrent: Annotated[int | None, Option(min=1, help="chats answered at the same time (default: any)")] = None,
    replace: Annotated[bool, Option("--replace", help="the one of this name is no longer accepted")] = False,
    file: File = None,
    config: Config = None,
) -> None:
    """Make a key and print it, once: only its digest is kept."""
    from server.keys.named import new_key, write

    path, keys = _file(file, config), _read(file, config, missing=True)
    if any(one.name == name for one in keys) and not replace:
        raise ValueError(f"there is a key {name!r} in {path} already; --replace makes a new one")
    key, kept = new_key(name, role or (), rate, concurrent)
    write(path, [*(one for one in keys if one.name != name), kept])
    print(key)
    typer.echo(f"{path} keeps its digest alone; servers with --named-key-file {path} take it from now on", err=True)


@app.command("list", cls=Command)
def list_keys(file: File = None, config: Config = None) -> None:
    """Show the keys with their roles and limits."""
    keys = _read(file, config)
    rows = [(one.name, ", ".join(one.roles), one.rate, one.concurrent, one.created or None) for one in keys]
    show(("NAME", "ROLES", "RATE", "CONCURRENT", "CREATED"), rows)


@app.command("revoke", cls=Command)
def revoke(name: Name, file: File = None, config: Config = None) -> None:
    """Take a key out: from the next request on it is not accepted."""
    from server.keys.named import write

    path, keys = _file(file, config), _read(file, config)
    left = [one for one in keys if one.name != name]
    if len(left) == len(keys):
        raise ValueError(f"there is no key {name!r} in {path}; it has: {', '.join(one.name for one in keys) or 'none'}")
    write(path, left)
    print(f"{name} is revoked")


def _file(file: str | None, config: str | None) -> Path:
    return Path(file or settings_of(config).named_key_file or DEFAULT).expanduser()


def _read(file: str | None, config: str | None, missing: bool = False) -> tuple[NamedKey, ...]:
    """The keys of the file; none where it is `missing` and may be. Raises ValueError."""
    from server.keys.named import read

    path = _file(file, config)
    try:
        return read(path)
    except FileNotFoundError:
        if missing:
            return ()
        raise ValueError(f"there is no {path}; 'helmsight keys add NAME' makes it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
