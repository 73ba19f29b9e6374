"""Backups of a journal with its images, consistent while servers write to it and readable by their owner only."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import URL

from server.journal.database import Database
from server.journal.pictures import CONTENT, pictures_folder
from server.journal.schema import VERSION_TABLE, metadata
from steering.files import write_atomically

SERVICE = "helmsight"


def back_up(database: Database, file: Path) -> int:
    """Write a backup to a file, replacing it, and return its size in bytes.

    A SQLite journal becomes a SQLite file, which is a journal itself; one in PostgreSQL becomes an archive for pg_restore.
    Raises ValueError or OSError, and leaves the file as it was.
    """
    with _replacing(file) as temporary:
        if database.place.path is not None:
            _copy(database, temporary)
        else:
            assert database.place.url is not None
            _dump(database.place.url, temporary, database.place.secrets)
        return temporary.stat().st_size


def back_up_pictures(journal: str, file: Path) -> tuple[Path, int, int]:
    """Copy the images of stored responses to the folder where a journal of that file has them; call it behind `back_up`.

    Images that are no longer kept are deleted there. Return the folder, the number of images, and their bytes.
    """
    source, target = pictures_folder(journal), file.with_name(f"{file.name}.pictures")
    names = {path.name for path in source.iterdir() if CONTENT.fullmatch(path.name)} if source.is_dir() else set()
    for path in target.iterdir() if target.is_dir() else ():
        if path.name not in names and CONTENT.fullmatch(path.name):
            path.unlink()
    if names:
        target.mkdir(mode=0o700, exist_ok=True)
    count = size = 0
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            if not (target / name).exists():
                write_atomically(target / name, (source / name).read_bytes(), mode=0o600)
            shutil.copystat(source / name, target / name)  # the time counts for the days that an image is kept
            count, size = count + 1, size + (target / name).stat().st_size
    return target, count, size


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Hold a temporary file of mode 0600, which replaces the file unless the block raises."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    temporary = Path(name)
    try:
        yield temporary
        os.fsync(handle)
        temporary.replace(file)
    finally:
        os.close(handle)
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + suffix)


def _copy(database: Database, file: Path) -> None:
    """Copy a SQLite journal as of one moment, which does not block its writers, and check the copy."""
    with closing(database.engine.raw_connection()) as source, closing(sqlite3.connect(file)) as copy:
        try:
            source.driver_connection.backup(copy)  # type: ignore[union-attr]
            copy.execute("PRAGMA journal_mode = DELETE")  # else two more files would belong to it once it is read
            (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            raise ValueError(f"{database.place.shown} cannot be copied to {file.parent}: {error}") from None
    if verdict != "ok":
        raise ValueError(f"{database.place.shown} is damaged: {verdict}")


def _dump(url: URL, file: Path, secrets: tuple[str, ...]) -> None:
    """Write the journal's tables with pg_dump, which reads the connection from a file: others see arguments of processes."""
    if (program := shutil.which("pg_dump")) is None:
        raise ValueError("a journal in PostgreSQL is backed up by pg_dump, which is not installed")
    connection = {
        "host": url.host,
        "port": url.port,
        "user": url.username,
        "dbname": url.database,
        "password": url.password,
    }
    options = {name: value for name, value in connection.items() if value is not None} | dict(url.query)
    tables = [f"--table={name}" for name in (VERSION_TABLE, *metadata.tables)]
    with tempfile.TemporaryDirectory() as folder:  # of mode 0700
        service = Path(folder, "pg_service.conf")
        service.write_text(f"[{SERVICE}]\n" + "".join(f"{name}={value}\n" for name, value in options.items()))
        done = subprocess.run(
            [program, "--format=custom", "--no-owner", "--no-password", f"--file={file}", *tables],
            env=os.environ | {"PGSERVICEFILE": str(service), "PGSERVICE": SERVICE},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        message = done.stderr.strip().partition("\n")[0]
        for secret in secrets:
            message = message.replace(secret, "***")
        raise ValueError(message or f"pg_dump ended with status {done.returncode}")
