"""`helmsight keys add | rotate | list | revoke`: the file of named keys, which a running server rereads when it changes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from probes.harness.options import Command
from server.commands.options import Config, settings_of, show
from server.commands.times import duration, expiry

if TYPE_CHECKING:
    from server.access.named import NamedKey

DEFAULT = "~/.helmsight/keys.json"

Name = Annotated[str, Argument(help="name of the key, shown in the journal and the metrics")]
File = Annotated[str | None, Option(metavar="FILE", help=f"default: that of the settings, or {DEFAULT}")]
Expires = Annotated[
    str | None,
    Option(metavar="TIME", help="time from which on the key is refused: 90d, 2027-01-31, or never (default: never)"),
]

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
            help="replace the key of this name at once; the new one has its roles and limits unless others are given",
        ),
    ] = False,
    expires: Expires = None,
    file: File = None,
    config: Config = None,
) -> None:
    """Make a key and print it once, since only its digest is kept."""
    from server.access.named import new_key, write

    path = _file(file, config)
    with _alone(path):
        keys = _read(file, config, missing=True)
        old = next((entry for entry in keys if entry.name == name), None)
        if old is not None and not replace:
            raise ValueError(f"{path} already has a key {name!r}; 'helmsight keys rotate {name}' makes a new one")
        if old is not None:  # rotating a key replaces its secret only
            role, rate = role or list(old.roles), old.rate if rate is None else rate
            concurrent = old.concurrent if concurrent is None else concurrent
        limits = None if rate == "any" else rate, concurrent or None
        key, stored = new_key(name, role or (), *limits, _expiry(expires, old))
        write(path, [*(entry for entry in keys if entry.name != name), stored])
    print(key)
    typer.echo(
        f"the key {name!r} is shown once: {path} stores only its digest; servers with --named-key-file {path} accept it "
        "from now on",
        err=True,
    )


@app.command("rotate", cls=Command)
def rotate(
    name: Name,
    overlap: Annotated[
        str, Option(metavar="DURATION", help="how long the old key is still accepted: 30m, 1h, 7d, or 0")
    ] = "1h",
    expires: Expires = None,
    file: File = None,
    config: Config = None,
) -> None:
    """Replace a key by a new one with the same roles and limits, and print that once.

    The old key is accepted for --overlap more, so that clients can be given the new one without an interruption.
    """
    from server.access import named

    path, accepted = _file(file, config), duration(overlap)
    with _alone(path):
        keys = _read(file, config)
        old = _named(name, keys, path)
        key, stored = named.rotate(old, accepted, _expiry(expires, old))
        named.write(path, [stored if entry.name == name else entry for entry in keys])
    print(key)
    until = max((previous.expires for previous in stored.rotated), default=None)
    ends = "no longer" if until is None else f"until {_time(until)}"
    typer.echo(
        f"the new key {name!r} is shown once; servers with --named-key-file {path} accept it from now on, and the old one "
        f"{ends}",
        err=True,
    )


@app.command("list", cls=Command)
def list_keys(file: File = None, config: Config = None) -> None:
    """Show the keys with their roles and limits, when they expire, and until when a rotated one is still accepted."""
    rows = [
        (
            key.name,
            ", ".join(key.roles),
            key.rate,
            key.concurrent,
            key.created or None,
            _until(key.expires),
            _until(max((old.expires for old in key.rotated), default=None)),
        )
        for key in _read(file, config)
    ]
    show(("NAME", "ROLES", "RATE", "CONCURRENT", "CREATED", "EXPIRES", "OLD KEY UNTIL"), rows)


@app.command("revoke", cls=Command)
def revoke(name: Name, file: File = None, config: Config = None) -> None:
    """Revoke a key, and rotated ones of its name, which are no longer accepted from the next request on."""
    from server.access.named import write

    path = _file(file, config)
    with _alone(path):
        keys = _read(file, config)
        revoked = _named(name, keys, path)
        write(path, [key for key in keys if key is not revoked])
    print(f"{name} is revoked")


def _named(name: str, keys: tuple[NamedKey, ...], path: Path) -> NamedKey:
    """Return the key of this name; raises ValueError."""
    for key in keys:
        if key.name == name:
            return key
    names = ", ".join(key.name for key in keys) or "none"
    raise ValueError(f"there is no key {name!r} in {path}; it has: {names}")


def _expiry(text: str | None, old: NamedKey | None) -> datetime | None:
    """Return the expiry of a new key; raises ValueError if it is not given, and that of the key before was."""
    if text is None and old is not None and old.expires is not None:
        raise ValueError(
            f"the key {old.name!r} expires at {_time(old.expires)}: say with --expires when the new one does, or never"
        )
    return None if text is None else expiry(text)


def _until(time: datetime | None) -> str | None:
    """Return the time until which a key is accepted, marked if that is over; None for always."""
    return None if time is None else f"{_time(time)}{' (expired)' if time <= datetime.now(UTC) else ''}"


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


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
