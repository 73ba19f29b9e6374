"""Journals for tests: a real PostgreSQL that the tests start, rows with chosen values, and waiting for the writer."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from server.journal.database import Database
from server.journal.reading.fields import ADDED_NAMES
from server.journal.schema import DIAGNOSTICS, ROWS
from server.journal.writer import Journal
from tests.waiting import PATIENCE

HOUR = 472_222
START = HOUR * 3600.0
"""A full hour in 2023."""
NOTHING_SAID = dict.fromkeys(
    (*DIAGNOSTICS, "image_share", "context_share", "mean_logprob", "least_logprob", "alarm", "alarm_score")
)
"""The numbers of an answer beside which nothing is read."""


def row(number: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a row as the writer takes it; `created` is `number` seconds after START unless given."""
    created = columns.pop("created", START + number)
    return {
        "id": f"chatcmpl-{number}", "choice": 0, "created": created, "hour": int(created // 3600), "model": "m",
        "finish_reason": "stop", "streamed": False, "intervention": "none", "toward": "none", "sage_see": False,
        "sage_think": False, "sage_generate": False, "contrast": "none", "vectors": "|", "prompt_tokens": 3,
        "completion_tokens": 2, "images": 0, "first_token": 0.1, "total": 0.2, "answer_correct": None, "sampling": "{}",
        "asked": "{}", "applied": None, "metadata": None, "prompt": None, "answer": None, "interventions": "|",
        "readouts": None, **dict.fromkeys((*DIAGNOSTICS, *ADDED_NAMES)), **columns,
    }  # fmt: skip


def put(database: Database, *rows: dict[str, Any]) -> None:
    """Write rows at once."""
    with database.writer.begin() as connection:
        connection.execute(insert(ROWS), list(rows))


def settled(journal: Journal, rows: int, seconds: float = PATIENCE) -> Journal:
    """Wait until the journal has written so many rows."""
    deadline = time.monotonic() + seconds
    while journal.written < rows:
        assert time.monotonic() < deadline, journal.status()
        time.sleep(0.01)
    return journal


class Postgres:
    """A PostgreSQL server for the tests, on a unix socket, run as a user that it accepts.

    With a password it also listens on a loopback port, where it asks for the password.
    """

    def __init__(self, programs: Path, folder: Path, password: str | None = None):
        self.programs, self.folder = programs, folder
        self.databases = 0
        self.port, self.listens = 5432, ""
        os.chmod(folder, 0o700)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        asks = ["--auth", "trust"]
        if password is not None:
            (file := folder / "password").write_text(password)
            file.chmod(0o644)  # of a folder that others do not enter
            asks = ["--auth-local", "trust", "--auth-host", "scram-sha-256", "--pwfile", str(file)]
            with socket.create_server((address := "127.0.0.1", 0)) as held:
                self.port, self.listens = held.getsockname()[1], address
        self._run("initdb", "--pgdata", str(folder / "data"), "--username", "helmsight", *asks, "--no-sync")

    def start(self) -> None:
        options = f"-k {self.folder} -p {self.port} -c listen_addresses='{self.listens}' -c fsync=off"
        log = str(self.folder / "log")
        self._run("pg_ctl", "--pgdata", str(self.folder / "data"), "--wait", "--log", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "--pgdata", str(self.folder / "data"), "--wait", "--mode", "immediate", "stop")

    def new(self, options: str = "") -> str:
        """Return the URL of a new, empty database.

        options: appended to CREATE DATABASE.
        """
        self.databases += 1
        name = f"journal{self.databases}"
        self.run("postgres", f"CREATE DATABASE {name} {options}")
        return f"postgresql://helmsight:secret-word@/{name}?host={self.folder}"

    def run(self, database: str, command: str) -> list[Any]:
        """Run a command of SQL; the rows that it gives."""
        import psycopg

        where = f"host={self.folder} port={self.port} user=helmsight dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            done = connection.execute(command.encode())
            return done.fetchall() if done.description else []

    def _run(self, program: str, *arguments: str) -> None:
        become = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
        subprocess.run(
            [*become, str(self.programs / program), *arguments],
            check=True, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PATIENCE,
        )  # fmt: skip


@contextmanager
def running_postgres(password: str | None = None) -> Iterator[Postgres]:
    """Run a server; skip the test where PostgreSQL or its driver is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders or not (folders[-1] / "pg_ctl").exists():
        pytest.skip("PostgreSQL is not installed")
    if os.geteuid() == 0 and not shutil.which("runuser"):
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")
    folder = Path(tempfile.mkdtemp(prefix="helmsight-pg-"))  # a short path: socket names are bounded
    try:
        server = Postgres(folders[-1], folder, password)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
