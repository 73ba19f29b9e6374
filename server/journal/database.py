"""Opening a journal: from the setting to a migrated database, SQLite in WAL mode or PostgreSQL, with the same code."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from server.journal.errors import JournalError, explain
from server.journal.schema import VERSION_TABLE

log = logging.getLogger("helmsight")

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 5.0
"""Seconds that a process waits for another one's lock on the SQLite file."""
POOL_SECONDS = 5.0

_ADVISORY_LOCK = 0x48656C6D  # "Helm": one migration at a time among all servers of one PostgreSQL
_migrating = threading.Lock()  # alembic keeps its state in globals


@dataclass(frozen=True)
class Place:
    """The location of a journal: `path` of an SQLite file or `url` of a PostgreSQL database. `shown` is safe for logs."""

    shown: str
    path: Path | None = None
    url: URL | None = None

    @classmethod
    def of(cls, setting: str) -> Place:
        """Parse the setting `journal`: a path, or a URL of SQLite or PostgreSQL; raises JournalError."""
        if "://" not in setting:
            path = Path(setting).expanduser().absolute()
            return cls(str(path), path=path)
        try:
            url = make_url(setting)
        except (ArgumentError, ValueError):
            raise JournalError("bad_url") from None  # the text may hold a password
        kind = url.drivername.partition("+")[0]
        if kind == "sqlite" and url.database and url.database != ":memory:":
            path = Path(url.database).expanduser().absolute()
            return cls(str(path), path=path)
        if kind not in ("postgresql", "postgres"):
            raise JournalError("bad_url", url.drivername)
        url = url.set(drivername="postgresql+psycopg")
        return cls(_without_query(url).render_as_string(hide_password=True), url=url)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that no message may contain."""
        if self.url is None:
            return ()
        values = [
            str(self.url.password or ""),
            *(str(value) for name, value in self.url.query.items() if "pass" in name),
        ]
        return tuple(secret for secret in values if secret)


def _without_query(url: URL) -> URL:
    return url.set(query={})


@dataclass(frozen=True)
class Database:
    """An open journal; reads use `engine`, writes use `writer`, which takes the write lock at once."""

    place: Place
    engine: Engine
    writer: Engine
    inode: int | None = None

    def moved(self) -> bool:
        """Return whether the SQLite file was deleted or replaced, so that writes would be lost silently."""
        if self.place.path is None:
            return False
        try:
            return self.place.path.stat().st_ino != self.inode
        except OSError:
            return True

    def explain(self, error: Exception) -> JournalError:
        """Return the JournalError that explains an exception of this database."""
        return explain(error, self.place.shown, self.place.secrets)

    def close(self) -> None:
        """Close every idle connection."""
        self.engine.dispose()


def open_database(
    place: Place, create: bool = True, busy_seconds: float = BUSY_SECONDS, upgrade: bool = True
) -> Database:
    """Open a journal, migrate it if `upgrade`, and create missing files, folders and tables if `create`.

    Raises JournalError.
    """
    engine = None
    try:
        inode = None
        if place.path is not None:
            inode = _file(place.path, create)
            engine = _sqlite(place.path, busy_seconds)
        else:
            assert place.url is not None
            engine = _postgres(place.url)
        database = Database(place, engine, engine.execution_options(journal_write=True), inode)
        _migrate(database.writer, create, upgrade)
        return database
    except Exception as error:
        if engine is not None:
            engine.dispose()
        raise explain(error, place.shown, place.secrets) from None


def _file(path: Path, create: bool) -> int:
    """Return the inode of the file, which is created for its owner only, since rows may hold prompts."""
    if path.is_dir():
        raise JournalError("not_a_database", f"{path} is a folder")
    if not path.exists():
        if not create:
            raise JournalError("missing", str(path))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    if not os.access(path, os.W_OK):
        raise JournalError("not_writable", str(path))
    return path.stat().st_ino


def _sqlite(path: Path, busy_seconds: float) -> Engine:
    # A URI, because SQLite would recreate a vanished plain path, empty and with default permissions.
    uri = f"file:{quote(str(path))}?mode=rw"
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, timeout=busy_seconds, check_same_thread=False),
        poolclass=QueuePool,
        pool_timeout=POOL_SECONDS,
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver's own transactions exclude reads and DDL
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut too
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA temp_store = MEMORY")  # samples of the summary

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads before it writes would fail instead of waiting if another process wrote in between.
        writes = connection.get_execution_options().get("journal_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgres(url: URL) -> Engine:
    # A server that vanishes silently must not block the writer for TCP's two hours.
    patience = {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
    }
    texts = {"client_encoding": "utf8"}  # otherwise the driver returns bytes if the database has no encoding
    connect_args = {name: value for name, value in (patience | texts).items() if name not in url.query}
    return create_engine(
        url, connect_args=connect_args, pool_pre_ping=True, pool_timeout=POOL_SECONDS, hide_parameters=True
    )


def _migrate(writer: Engine, create: bool, upgrade: bool) -> None:
    """Bring the schema up to date; raises JournalError if it is newer than this version knows."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with _migrating, writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        current = context.get_current_heads()
        if not current and not create:
            raise JournalError("missing")
        for revision in current:
            try:
                scripts.get_revision(revision)
            except CommandError:
                raise JournalError("newer_version", f"revision {revision[:32]}") from None
        if upgrade and set(current) != set(scripts.get_heads()):
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            if current:
                log.info("journal: migrated from revision %s to %s", ", ".join(current), ", ".join(scripts.get_heads()))
