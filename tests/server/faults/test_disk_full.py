"""A journal on a disk that is full, at the start and later on.

Chats are answered, `/ready` and `/metrics` report it, and rows are written as soon as there is room.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import requests

from server.journal.database import Place, open_database
from tests.server.conftest import user
from tests.server.process.servers import PATIENCE, Server
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--slots", "4"]
SIZE = 4 * 2**20
"""Bytes of the disk."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk; skip the test where mounting is not permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "helmsight-test", place], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only who may mount a disk can have a full one")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """Take all room that is left; returns the file that has it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


def test_chats_are_answered_while_the_disk_is_full_and_their_rows_come_later(disk: Path, tmp_path: Path) -> None:
    place = disk / "journal.db"
    open_database(Place.of(str(place))).close()  # the journal of an earlier run
    filler = fill(disk)
    server = Server([*SERVE, "--journal", str(place)], tmp_path / "log")
    asked: list[str] = []

    def answered(count: int) -> None:
        for _ in range(count):
            asked.append(str(len(asked)))
            stream = len(asked) % 2 == 1
            body = {"messages": [user("hi")], "max_tokens": 2, "stream": stream, "metadata": {"number": asked[-1]}}
            answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
            assert (answer.status_code, "error" in answer.text) == (200, False), answer.text

    def tells_that_it_is_full(written: int) -> None:
        wait_for(lambda: server.get("/ready").json()["journal"]["state"] == "failing")
        ready = server.get("/ready")
        said = ready.json()["journal"]
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert (said["reason"], said["error"]) == ("disk_full", "the disk is full")
        assert (said["written"], said["dropped"], said["waiting"]) == (written, 0, len(asked) - written)
        assert server.stats("helmsight_journal_up") == 0
        assert server.stats("helmsight_journal_waiting") == len(asked) - written
        assert server.stats('helmsight_journal_rows_total{outcome="written"}') == written

    def writes_again() -> None:
        wait_for(lambda: server.get("/ready").json()["journal"]["state"] == "ok")
        wait_for(lambda: server.stats('helmsight_journal_rows_total{outcome="written"}') == len(asked))
        said = server.get("/ready").json()["journal"]
        assert said == {"state": "ok", "written": len(asked), "dropped": 0, "waiting": 0}
        assert server.stats("helmsight_journal_up") == 1
        with closing(sqlite3.connect(place)) as reader:
            rows = reader.execute("SELECT json_extract(metadata, '$.number') FROM helmsight_journal").fetchall()
        assert sorted((row[0] for row in rows), key=int) == asked

    try:
        server.wait_until_ready()
        answered(6)
        tells_that_it_is_full(written=0)
        filler.unlink()
        writes_again()

        answered(4)
        writes_again()
        fill(disk)
        answered(6)
        tells_that_it_is_full(written=10)
        filler.unlink()
        writes_again()
        answered(1)
        writes_again()
        log = server.log.read_text()
        assert (log.count("the disk is full"), log.count("writing again")) == (2, 2), "each is logged once"
        assert "Traceback" not in log
    finally:
        server.end()
