"""`helmsight journal backup`: a whole journal while others write, for its owner only, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import base64
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from server.cli import main
from server.journal.database import Database, Place, open_database
from server.journal.pictures import KeptPictures, pictures_folder
from server.journal.schema import VERSION_TABLE
from tests.server.journal.counting import ids
from tests.server.journal.journals import Postgres, put, row

needs_pg_dump = pytest.mark.skipif(shutil.which("pg_dump") is None, reason="pg_dump is not installed")


def back_up(file: Path, journal: str, *flags: str) -> int:
    return main(["journal", "backup", str(file), "--journal", journal, *flags])


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Database]:
    """Return an open journal, whose last rows are in its write-ahead log."""
    database = open_database(Place.of(str(tmp_path / "served" / "journal.db")))
    yield database
    database.close()


@contextmanager
def writing(database: Database) -> Iterator[None]:
    """Write pairs of rows, each pair at once, for the duration of the context."""
    stop = threading.Event()

    def write() -> None:
        number = 10
        while not stop.is_set():
            put(database, row(number), row(number + 1))
            number += 2

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_backup_is_a_journal_of_one_moment(
    source: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(source, row(1, prompt="x" * 4000), row(2))
    file, counts = tmp_path / "kept" / "backup.db", []
    file.parent.mkdir()
    before = os.umask(0)
    try:
        with writing(source):
            for _ in range(5):
                assert back_up(file, str(source.place.path), "--replace") == 0
                with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as copy:
                    counts.append(copy.execute("SELECT count(*) FROM helmsight_journal").fetchone()[0])
    finally:
        os.umask(before)
    assert [count % 2 for count in counts] == [0] * 5
    assert 2 <= counts[0] < counts[-1]
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file], "nothing else belongs to it"
    assert capsys.readouterr().out.splitlines()[-1] == f"{file}: {file.stat().st_size:,} bytes"
    restored = open_database(Place.of(str(file)))
    assert {1, 2} < set(ids(restored, limit=100_000))
    restored.close()


def test_a_backup_takes_the_images_along_and_drops_those_that_are_gone(
    source: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = str(source.place.path)
    kept, file = KeptPictures(pictures_folder(journal), 2**20, 30), tmp_path / "backup.db"
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (b"first", b"second")]
    first, second = map(kept.keep, urls)
    assert back_up(file, journal) == 0
    copied = tmp_path / "backup.db.pictures"
    assert f"{copied}: 11 bytes, 2 images of stored responses" in capsys.readouterr().out
    assert (copied.stat().st_mode & 0o777, {path.stat().st_mode & 0o777 for path in copied.iterdir()}) == (
        0o700,
        {0o600},
    )
    restored = KeptPictures(pictures_folder(str(file)), 2**20, 30)
    assert [restored.url_of(url, "id") for url in (first, second)] == urls, "where a journal of that name has them"
    kept.discard([first])
    assert back_up(file, journal, "--replace") == 0
    assert [path.read_bytes() for path in copied.iterdir()] == [b"second"], "what was deleted is no longer kept there"


def test_a_backup_is_of_the_version_that_wrote_the_journal(source: Database, tmp_path: Path) -> None:
    """Otherwise the backup before an upgrade, by the new version, would upgrade the journal of the old one."""
    put(source, row(1))
    stamp = text(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
    with source.writer.begin() as connection:
        connection.execute(stamp)
    assert back_up(tmp_path / "backup.db", str(source.place.path)) == 0
    for path in (tmp_path / "backup.db", source.place.path):
        with closing(sqlite3.connect(str(path))) as connection:
            assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [("0001",)]


def test_a_file_is_overwritten_only_when_told_and_only_by_a_whole_backup(
    source: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(source, *(row(number, prompt="x" * 4000) for number in range(50)))
    source.close()
    journal, file = Path(str(source.place.path)), tmp_path / "backup.db"
    file.write_text("an older one")
    assert back_up(file, str(journal)) == 1
    assert "already exists; --replace overwrites it" in capsys.readouterr().err
    with journal.open("r+b") as damaged:
        damaged.seek(20 * 4096)
        damaged.write(b"\xff" * 4096 * 4)
    assert back_up(file, str(journal), "--replace") == 1
    assert "damaged" in (said := capsys.readouterr().err) or "malformed" in said
    assert file.read_text() == "an older one"
    assert back_up(tmp_path / "nowhere" / "backup.db", str(journal)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"served", "backup.db"}


@needs_pg_dump
def test_a_backup_of_postgresql_is_restored_by_its_own_program(postgres: Postgres, tmp_path: Path) -> None:
    """Its password is on no command line."""
    url, programs = postgres.new(), tmp_path / "programs"
    database = open_database(Place.of(url))
    put(database, row(1), row(2))
    with database.writer.begin() as connection:
        connection.execute(text("CREATE TABLE theirs (x integer)"))
    programs.mkdir()
    log = programs / "arguments"
    (programs / "pg_dump").write_text(f'#!/bin/sh\necho "$@" > {log}\nexec {shutil.which("pg_dump")} "$@"\n')
    (programs / "pg_dump").chmod(0o755)
    file = tmp_path / "backup.dump"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        assert back_up(file, url) == 0
    database.close()
    assert "secret-word" not in log.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    other = postgres.new()
    where = f"host={postgres.folder} user=helmsight dbname=journal{postgres.databases}"
    subprocess.run(["pg_restore", "--no-owner", "--exit-on-error", f"--dbname={where}", str(file)], check=True)
    restored = open_database(Place.of(other), create=False)
    assert sorted(ids(restored)) == [1, 2]
    put(restored, row(3))  # by the next key
    with restored.engine.connect() as connection:
        assert not connection.execute(text("SELECT to_regclass('theirs')")).scalar(), "what is not the journal's"
    restored.close()


def test_without_its_program_a_backup_of_postgresql_says_so(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.new()
    open_database(Place.of(url)).close()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert back_up(tmp_path / "backup.dump", url) == 1
    assert "pg_dump, which is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
