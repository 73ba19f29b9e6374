"""`helmsight keys add | list | revoke`: the file of named keys, which a running server reads anew when it changes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from probes.harness.options import Command
from server.commands.options import Config, settings_of, show

if TYPE_CHECKING:
    from server.access.named import NamedKey

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
        str | None, Option(metavar="N/TIME", help="chats in a time, such as 60/minute, or any (default: any)")
    ] = None,
    concurrent: Annotated[
        int | None, Option(min=0, help="chats answered at the same time, 0 for any (default: any)")
    ] = None,
    replace: Annotated[
        bool,
        Option(
            "--replace",
            help="the one of this name is no longer accepted; the new one has its roles and limits, where none are given",
        ),
    ] = False,
    file: File = None,
    config: Config = None,
) -> None:
    """Make a key and print it, once: only its digest is kept."""
    from server.access.named import new_key, write

    path = _file(file, config)
    with _alone(path):
        keys = _read(file, config, missing=True)
        old = next((one for one in keys if one.name == name), None)
        if old is not None and not replace:
            raise ValueError(f"there is a key {name!r} in {path} already; --replace makes a new one")
        if old is not None:  # who rotates a key means its secret alone
            role, rate = role or list(old.roles), old.rate if rate is None else rate
            concurrent = old.concurrent if concurrent is None else concurrent
        key, kept = new_key(name, role or (), None if rate == "any" else rate, concurrent or None)
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
    from server.access.named import write

    path = _file(file, config)
    with _alone(path):
        keys = _read(file, config)
        left = [one for one in keys if one.name != name]
        if len(left) == len(keys):
            named = ", ".join(one.name for one in keys) or "none"
            raise ValueError(f"there is no key {name!r} in {path}; it has: {named}")
        write(path, left)
    print(f"{name} is revoked")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other commands from the keys of this folder, so that none of them writes what another one has changed since."""
    folder = path.parent
    if not folder.is_dir():  # what is not there yet, or is no folder, has no keys to lose
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _file(file: str | None, config: str | None) -> Path:
    return Path(file or settings_of(config).named_key_file or DEFAULT).expanduser()


def _read(file: str | None, config: str | None, missing: bool = False) -> tuple[NamedKey, ...]:
    """The keys of the file; none where it is `missing` and may be. Raises ValueError."""
    from server.access.named import read

    path = _file(file, config)
    try:
        return read(path)
    except FileNotFoundError:
        if missing:
            return ()
        raise ValueError(f"there is no {path}; 'helmsight keys add NAME' makes it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
