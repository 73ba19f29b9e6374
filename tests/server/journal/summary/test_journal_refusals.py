"""Refused requests are counted, in SQLite and in a real PostgreSQL, and nothing of them is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import insert, select

import steering
from server.journal import refusals
from server.journal.database import Database
from server.journal.reading.queries import Filters
from server.journal.refusals import Refusals
from server.journal.retention import prune
from server.journal.schema import REFUSALS
from server.journal.writer import Journal
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import START, settled
from tests.server.journal.journals import row as answer
from tests.server.journal.rows import Serve, database_of, rows_of
from tests.waiting import wait_for

MINUTE = int(START // 60)
CHAT = "/v1/chat/completions"


def counts(database: Database) -> list[tuple[Any, ...]]:
    with database.engine.connect() as connection:
        return [tuple(one) for one in connection.execute(select(REFUSALS).order_by(*REFUSALS.c))]


def put(database: Database, *rows: tuple[int, int, str, str, int]) -> None:
    names = REFUSALS.c.keys()
    with database.writer.begin() as connection:
        connection.execute(insert(REFUSALS), [dict(zip(names, row, strict=True)) for row in rows])


def write(database: Database, waiting: Refusals) -> None:
    with database.writer.begin() as connection:
        waiting.write(connection)
    waiting.written()


def test_counts_add_up_in_the_database(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: START + 61)
    one, other = Refusals(), Refusals()  # of two servers
    assert not one
    for _ in range(3):
        one.add(429, "rate_limit_exceeded", CHAT)
    one.add(400, "invalid_value", CHAT)
    write(database, one)
    assert not one
    one.add(429, "rate_limit_exceeded", CHAT)
    other.add(429, "rate_limit_exceeded", CHAT)
    write(database, one)
    write(database, other)
    assert counts(database) == [
        (MINUTE + 1, 400, "invalid_value", CHAT, 1), (MINUTE + 1, 429, "rate_limit_exceeded", CHAT, 5),
    ]  # fmt: skip


def test_what_comes_during_a_write_or_before_one_that_fails_is_kept(database: Database) -> None:
    waiting = Refusals()
    waiting.add(404, "unknown_route", "unknown")
    with database.writer.connect() as connection:
        waiting.write(connection)
        connection.rollback()
    waiting.add(404, "unknown_route", "unknown")
    with database.writer.begin() as connection:
        waiting.write(connection)
        waiting.add(404, "unknown_route", "unknown")
    waiting.written()
    assert sum(one[-1] for one in counts(database)) == 2
    write(database, waiting)
    assert sum(one[-1] for one in counts(database)) == 3


def test_there_is_room_for_so_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "KINDS", 2)
    monkeypatch.setattr(time, "time", lambda: START)
    waiting = Refusals()
    assert [waiting.add(400, code, "r") for code in ("a", "b", "c", "a")] == [True, True, False, True]


def test_the_summary_of_known_refusals(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        database,
        (MINUTE - 1, 400, "invalid_value", CHAT, 50),
        (MINUTE, 400, "invalid_value", CHAT, 2),
        (MINUTE + 4, 429, "rate_limit_exceeded", CHAT, 7),
        (MINUTE + 4, 400, "invalid_value", CHAT, 1),
        (MINUTE + 5, 400, "invalid_value", "/v1/steering/validate", 1),
        (MINUTE + 10, 503, "loading", CHAT, 9),
    )
    with database.engine.connect() as connection:
        found = refusals.refusals(connection, Filters(since=START, until=START + 600, model="none"), 300)
    assert found == {
        "count": 11,
        "by_code": [
            {"status": 429, "code": "rate_limit_exceeded", "route": CHAT, "count": 7},
            {"status": 400, "code": "invalid_value", "route": CHAT, "count": 3},
            {"status": 400, "code": "invalid_value", "route": "/v1/steering/validate", "count": 1},
        ],
        "by_time": {
            "bucket": 300,
            "rows": [
                {"start": int(START), "count": 10, "statuses": {"400": 3, "429": 7}},
                {"start": int(START) + 300, "count": 1, "statuses": {"400": 1}},
            ],
        },
    }
    monkeypatch.setattr(refusals, "MOST", 1)
    with database.engine.connect() as connection:
        newest = refusals.refusals(connection, Filters(), 300)["by_time"]["rows"]
    assert newest == [{"start": int(START) + 600, "count": 9, "statuses": {"503": 9}}]


def test_counts_go_with_the_rows(database: Database) -> None:
    put(database, *((MINUTE + i, 400, "invalid_value", "r", 1) for i in range(6)))
    with database.writer.begin() as connection:
        prune(connection, max_rows=100, before=START + 119)
    assert [one[0] - MINUTE for one in counts(database)] == [1, 2, 3, 4, 5]
    with database.writer.begin() as connection:
        prune(connection, max_rows=3, before=START)
    assert [one[0] - MINUTE for one in counts(database)] == [3, 4, 5]


def test_requests_that_are_refused_are_counted_and_answers_are_not(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, api_keys=(SecretStr("secret-key"),))
    key = {"Authorization": "Bearer secret-key"}
    assert client.post(CHAT, json={"messages": "a private word"}).status_code == 401
    for _ in range(2):
        refused = client.post(CHAT, json={"messages": "a private word"}, headers=key)
        assert refused.status_code == 400
    assert client.get("/a/private/word?or=two", headers=key).status_code == 404
    assert client.get("/v1/models", headers=key).status_code == 200
    assert client.get("/v1/diagnostics?limit=none", headers=key).status_code == 400  # no refusal of what is served
    assert client.get("/v1/diagnostics/summary?bucket=1", headers=key).status_code == 400
    assert client.post("/v1/diagnostics/none", headers=key, json={}).status_code == 400
    database = database_of(client)
    wait_for(lambda: sum(one[-1] for one in counts(database)) == 4)
    minute = int(time.time() // 60)
    assert all(0 <= minute - one[0] <= 1 for one in counts(database))
    assert {one[1:4] for one in counts(database)} == {
        (401, client.post(CHAT).json["error"]["code"], CHAT),
        (400, refused.json["error"]["code"], CHAT),
        (404, "unknown_route", "unknown"),
    }
    said = client.get("/v1/diagnostics/summary", headers=key).json["refusals"]
    assert "private" not in str(said)


def test_an_answer_that_fails_leaves_a_row_and_one_that_finds_no_room_is_counted(serve: Serve) -> None:
    engine = FakeEngine("a", steering.Fault("broken"))
    client = serve(engine)
    assert ask(client).status_code == 500
    (row,) = rows_of(client, 1)
    assert row["finish_reason"] == "error"
    engine.refusal = steering.Busy("full", retry_after=1.0)
    assert ask(client).status_code == 429
    database = database_of(client)
    wait_for(lambda: len(counts(database)) == 1)
    assert counts(database)[0][1:] == (429, "rate_limit_exceeded", CHAT, 1)


def test_what_waits_is_written_at_the_end(place: str, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "EVERY", 1000.0)
    journal = Journal(place, days=1e4)
    journal.start()
    journal.refuse(429, "rate_limit_exceeded", CHAT)
    wait_for(lambda: len(counts(database)) == 1)
    journal.refuse(429, "rate_limit_exceeded", CHAT)
    journal.record(answer(1))
    settled(journal, 1)
    assert counts(database)[0][-1] == 1  # not yet: it is not long since the last write
    journal.close()
    assert sum(one[-1] for one in counts(database)) == 2


def test_a_journal_that_is_off_counts_nothing() -> None:
    journal = Journal("off")
    journal.refuse(429, "rate_limit_exceeded", CHAT)
    assert not journal._refusals
    assert journal.dropped == 0
