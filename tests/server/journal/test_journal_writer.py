"""The writer: never in the way, whatever becomes of its database; what it has committed stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sqlalchemy import event, func, select, text
from werkzeug.serving import make_server

from server.app import create_app
from server.journal import retention, writer
from server.journal.database import Database, Place, open_database
from server.journal.retention import DAY, Clock
from server.journal.schema import ROWS, VERSION_TABLE
from server.journal.writer import Journal
from server.settings import Settings
from tests.forked import forked
from tests.server.api.test_operations import samples
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import Postgres, put, row, settled
from tests.waiting import PATIENCE, wait_for

Begin = Callable[..., Journal]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Make journals that try again soon, and close them."""
    monkeypatch.setattr(writer, "RETRY", (0.02, 0.1))
    made: list[Journal] = []

    def make(setting: object, start: bool = True, **options: Any) -> Journal:
        made.append(Journal(str(setting), **{"days": 1e4, **options}))  # the rows of these tests are old
        if start:
            made[-1].start()
        return made[-1]

    yield make
    for journal in made:
        journal.close()


def count(place: object) -> int:
    database = open_database(Place.of(str(place)))
    with database.engine.connect() as connection:
        found = connection.execute(select(func.count()).select_from(ROWS)).scalar_one()
    database.close()
    return int(found)


def test_rows_are_committed_in_the_background_and_at_the_end(begin: Begin, place: str) -> None:
    journal = begin(place)
    for number in range(250):
        journal.record(row(number))
    settled(journal, 250)
    assert (count(place), journal.status()) == (250, {"state": "ok", "written": 250, "dropped": 0, "waiting": 0})
    for number in range(30):
        journal.record(row(number))
    journal.close()
    assert count(place) == 280


def test_a_full_queue_drops_and_counts(begin: Begin, tmp_path: Path) -> None:
    journal = begin(tmp_path / "journal.db", start=False, queued=3)
    for number in range(5):
        journal.record(row(number))
    assert (journal.waiting, journal.dropped) == (3, 2)
    journal.start()
    settled(journal, 3)
    assert (count(tmp_path / "journal.db"), journal.status()["dropped"]) == (3, 2)


def test_a_journal_that_is_off_does_nothing(begin: Begin, fake: FakeEngine) -> None:
    assert begin("off").status() == begin("OFF").status() == {"state": "off"}
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    assert client.get("/ready").json == {"status": "ready", "journal": {"state": "off"}}
    for route in ("", "/summary", "/chatcmpl-1"):
        response = client.get(f"/v1/diagnostics{route}")
        assert (response.status_code, response.json["error"]["code"]) == (503, "journal_off")
    assert not any(name.startswith("helmsight_journal") for name in samples(client))


def test_a_place_that_is_none_yet_is_tried_until_it_is_one(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.db"
    path.mkdir()
    with caplog.at_level(logging.INFO, logger="helmsight"):
        journal = begin(path)
        for number in range(10):
            journal.record(row(number))
        wait_for(lambda: journal.state == "failing")
        time.sleep(0.3)  # several attempts
        status = journal.status()
        assert (status["reason"], status["written"], status["dropped"]) == ("not_a_database", 0, 0)
        assert str(tmp_path) not in status["error"], "/ready is open to everybody"
        path.rmdir()
        settled(journal, 10)
        wait_for(lambda: journal.state == "ok")
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "INFO"], (
        "logged once, not at each attempt"
    )
    assert count(path) == 10


def test_a_full_disk_is_reported_and_survived(begin: Begin, tmp_path: Path) -> None:
    pages = [20]
    opened: list[Database] = []

    def small_disk(place: Place) -> Database:
        database = open_database(place)
        database.close()  # the connection that knows of no limit
        event.listen(
            database.engine, "connect", lambda raw, _: raw.execute(f"PRAGMA max_page_count = {pages[0]}").close()
        )
        opened.append(database)
        return database

    journal = begin(tmp_path / "journal.db", queued=50, opener=small_disk)
    for number in range(300):
        journal.record(row(number, asked='"' + "x" * 4000 + '"'))
    wait_for(lambda: journal.status().get("reason") == "disk_full")
    assert 0 < journal.dropped < 300
    pages[0] = 100_000
    opened[0].close()
    settled(journal, 300 - journal.dropped)
    wait_for(lambda: journal.state == "ok")
    assert count(tmp_path / "journal.db") == journal.written == 300 - journal.dropped


def test_a_postgresql_that_goes_and_comes_back(begin: Begin, postgres: Postgres) -> None:
    place = postgres.new()
    journal = begin(place)
    journal.record(row(0))
    settled(journal, 1)
    postgres.stop()
    try:
        journal.record(row(1))
        wait_for(lambda: journal.state == "failing")
        assert journal.status()["reason"] == "unreachable"
        assert "secret-word" not in str(journal.problem)
    finally:
        postgres.start()
    settled(journal, 2)
    wait_for(lambda: journal.state == "ok")
    assert count(place) == 2


def test_a_row_that_no_database_takes_costs_no_other(begin: Begin, place: str) -> None:
    journal = begin(place, start=False)
    for number, columns in enumerate(({}, {"model": None}, {}, {"images": 2**80}, {})):
        journal.record(row(number, **columns))
    journal.start()
    settled(journal, 3)
    wait_for(lambda: journal.dropped == 2)
    assert (journal.state, count(place)) == ("ok", 3)


def test_a_deleted_file_is_made_anew(begin: Begin, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = begin(path)
    journal.record(row(0))
    settled(journal, 1)
    for file in tmp_path.iterdir():
        file.unlink()
    journal.record(row(1))
    settled(journal, 2)
    assert count(path) == 1


def test_the_newest_rows_are_kept(begin: Begin, place: str) -> None:
    journal = begin(place, max_rows=10)
    for number in range(500):
        journal.record(row(number))
    settled(journal, 500)
    wait_for(lambda: count(place) <= 10 + 2 * writer.BATCH)
    journal.close()
    late = begin(place, max_rows=10)  # prunes when it starts
    wait_for(lambda: count(place) == 10)
    assert late.state == "ok"


def test_rows_older_than_the_days_go(begin: Begin, place: str) -> None:
    database = open_database(Place.of(place))
    put(database, row(0, created=time.time() - 3 * DAY), row(1, created=time.time() - DAY))
    database.close()
    begin(place, days=2.0)
    wait_for(lambda: count(place) == 1)


def test_a_jumping_clock_deletes_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = Clock(), time.time
    for jump in (3600.0, 100 * DAY):
        monkeypatch.setattr(retention.time, "time", lambda jump=jump: now() + jump)
        assert abs(clock.now() - now()) < 60, "a clock that jumps ahead is not believed"
        monkeypatch.setattr(retention.time, "time", lambda jump=jump: now() - jump)
        assert abs(clock.now() - (now() - jump)) < 60, "one that jumps back only keeps rows longer"


def test_a_newer_journal_is_left_alone_and_the_server_goes_on(fake: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    database = open_database(Place.of(str(path)))
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    app = create_app(Settings(journal=str(path)), engine=fake)  # type: ignore[arg-type]
    client = app.test_client()
    refused = client.get("/v1/diagnostics")
    assert (refused.status_code, refused.json["error"]["code"]) == (503, "journal_unavailable")
    assert "newer version" in refused.json["error"]["message"]
    assert ask(client).status_code == 200
    ready = client.get("/ready")
    assert (ready.status_code, ready.json["journal"]["reason"]) == (200, "newer_version")
    assert samples(client)["helmsight_journal_up"] == 0
    app.extensions["helmsight"].journal.close()
    with database.engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(ROWS)).scalar_one() == 0
    database.close()


def test_two_processes_share_a_journal(begin: Begin, place: str, tmp_path: Path) -> None:
    def write() -> None:
        other = Journal(place, days=1e4)
        other.start()
        for number in range(300):
            other.record(row(1000 + number))
        settled(other, 300)
        other.close()

    with forked(write, said := tmp_path / "said") as process:
        journal = begin(place)
        for number in range(300):
            journal.record(row(number))
            time.sleep(0.002)
        settled(journal, 300)
        process.join(PATIENCE)
    assert process.exitcode == 0, said.read_text()
    assert (count(place), journal.dropped) == (600, 0)


def test_rows_that_were_shown_survive_kill_9(place: str, tmp_path: Path) -> None:
    def serve() -> None:
        app = create_app(Settings(journal=place), engine=FakeEngine())  # type: ignore[arg-type]
        server = make_server("127.0.0.1", 0, app, threaded=True)
        print(server.port, flush=True)
        server.serve_forever()

    with forked(serve, said := tmp_path / "said") as process:
        wait_for(lambda: said.exists() and "\n" in said.read_text())
        url = f"http://127.0.0.1:{said.read_text().split()[0]}/v1"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        asked = {requests.post(f"{url}/chat/completions", json=body, timeout=PATIENCE).json()["id"] for _ in range(40)}
        shown: set[str] = set()
        deadline = time.monotonic() + PATIENCE
        while len(shown) < 20 and time.monotonic() < deadline:
            page = requests.get(f"{url}/diagnostics?limit=1000", timeout=PATIENCE).json()
            shown = {found["id"] for found in page["data"]}
        assert len(shown) >= 20
        assert shown <= asked
        process.kill()
    database = open_database(Place.of(place))
    with database.engine.connect() as connection:
        assert shown <= set(connection.execute(select(ROWS.c.id)).scalars())
        if database.place.path is not None:
            assert connection.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
    database.close()


def test_a_row_is_on_disk_before_its_answer_ends(begin: Begin, place: str) -> None:
    journal = begin(place)
    journal.database()
    for number in range(20):
        assert journal.settle(journal.record(row(number)))
        assert count(place) == number + 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_read_to_its_end_survives_a_kill(tmp_path: Path, stream: bool) -> None:
    place = str(tmp_path / "journal.db")
    client = create_app(Settings(journal=place), engine=FakeEngine()).test_client()  # type: ignore[arg-type]
    client.get("/ready")
    client.application.extensions["helmsight"].journal.database()
    for number in range(10):
        assert ask(client, stream=stream).status_code == 200
        assert count(place) == number + 1, "another process sees the row at once"


def test_a_slow_journal_delays_one_answer_for_a_moment_and_the_next_not_at_all(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "journal.db"
    journal = begin(place)
    database = journal.database()
    assert journal.settle(journal.record(row(0)))
    monkeypatch.setattr(writer, "PATIENCE", 0.3)
    with database.writer.begin():  # as another process that holds the file locked
        started = time.monotonic()
        assert not journal.settle(journal.record(row(1)))
        assert time.monotonic() - started > 0.25
        monkeypatch.setattr(writer, "PATIENCE", 60.0)
        started = time.monotonic()
        for number in range(2, 50):
            assert not journal.settle(journal.record(row(number)))
            assert time.monotonic() - started < 60.0
    settled(journal, 50)
    assert journal.settle(journal.record(row(50)))


def test_a_broken_journal_delays_nothing(begin: Begin, tmp_path: Path) -> None:
    journal = begin(tmp_path)  # a folder
    wait_for(lambda: journal.state == "failing")
    started = time.monotonic()
    for number in range(50):
        assert not journal.settle(journal.record(row(number)))
        assert time.monotonic() - started < 60.0
