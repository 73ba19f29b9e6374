"""A journal whose file somebody else holds locked, as a copy of it or a look at it may: nobody who chats hears of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import requests
from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.conftest import user
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import settled
from tests.waiting import PATIENCE


def test_chats_are_answered_while_the_file_is_locked_and_their_rows_come_later(
    serve_worker: Callable[[Flask], int], tmp_path: Path
) -> None:
    place = tmp_path / "journal.db"
    app = create_app(Settings(journal=str(place), vectors=()), engine=FakeEngine())  # type: ignore[arg-type]
    journal = app.extensions["helmsight"].journal
    url = f"http://127.0.0.1:{serve_worker(app)}/v1/chat/completions"

    def answered(number: int) -> str:
        body = {"messages": [user("hi")], "stream": number % 2 == 1, "metadata": {"number": str(number)}}
        answer = requests.post(url, json=body, timeout=PATIENCE)
        assert (answer.status_code, "error" in answer.text) == (200, False), answer.text
        return str(number)

    asked = [answered(0)]
    settled(journal, 1)
    with closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked += [answered(number) for number in range(1, 9)]
        assert journal.written == 1, "nothing could be written meanwhile"
        other.execute("COMMIT")
    settled(journal, len(asked))
    status = journal.status()
    assert (status["state"], status["dropped"], status["waiting"]) == ("ok", 0, 0)
    with closing(sqlite3.connect(place)) as reader:
        kept = [row[0] for row in reader.execute("SELECT json_extract(metadata, '$.number') FROM helmsight_journal")]
    assert sorted(kept, key=int) == asked
    journal.close()
