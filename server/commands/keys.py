"""`helmsight keys add | list | revoke`: the file of named keys, which a running server rereads when it changes."""

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

Name = Annotated[str, Argument(help="name of the key, shown in the journal and the metrics")]
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
            help="role of the key: use (chats, models), journal (reading it and the metrics), vectors (uploading and "
            "deleting them); repeatable (default: use)",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        Option(metavar="N/TIME", help="rate limit of chats, such as 60/minute, or any for none (default: any)"),
    ] = None,
    concurrent: Annotated[
        int | None, Option(min=0, help="largest number of concurrent chats, 0 for no limit (default: no limit)")
    ] = None,
    replace: Annotated[
        bool,
        Option(
            "--replace",
            help="replace the key of this name; the new one has its roles and limits unless others are given",
        ),
    ] = False,
    file: File = None,
    config: Config = None,
) -> None:
    """Make a key and print it once, since only its digest is kept."""
    from server.access.named import new_key, write

    path = _file(file, config)
    with _alone(path):
        keys = _read(file, config, missing=True)
        old = next((one for one in keys if one.name == name), None)
        if old is not None and not replace:
            raise ValueError(f"{path} already has a key {name!r}; --replace makes a new one")
        if old is not None:  # rotating a key replaces its secret only
            role, rate = role or list(old.roles), old.rate if rate is None else rate
            concurrent = old.concurrent if concurrent is None else concurrent
        key, kept = new_key(name, role or (), None if rate == "any" else rate, concurrent or None)
        write(path, [*(one for one in keys if one.name != name), kept])
    print(key)
    typer.echo(f"{path} stores only its digest; servers with --named-key-file {path} accept it from now on", err=True)


@app.command("list", cls=Command)
def list_keys(file: File = None, config: Config = None) -> None:
    """Show the keys with their roles and limits."""
    keys = _read(file, config)
    rows = [(one.name, ", ".join(one.roles), one.rate, one.concurrent, one.created or None) for one in keys]
    show(("NAME", "ROLES", "RATE", "CONCURRENT", "CREATED"), rows)


@app.command("revoke", cls=Command)
def revoke(name: Name, file: File = None, config: Config = None) -> None:
    """Revoke a key, which is no longer accepted from the next request on."""
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
    """Lock the folder of keys against other commands, so that concurrent changes are not lost."""
    folder = path.parent
    if not folder.is_dir():  # without a folder there are no keys to lose
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
    """Return the keys of the file; none if `missing` is allowed and the file does not exist. Raises ValueError."""
    from server.access.named import read

    path = _file(file, config)
    try:
        return read(path)
    except FileNotFoundError:
        if missing:
            return ()
        raise ValueError(f"there is no {path}; 'helmsight keys add NAME' creates it") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
