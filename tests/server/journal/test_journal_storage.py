"""The journal's rows, the same tests in SQLite and in a real PostgreSQL: filters, pages, retention, several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import select

from server.journal.database import Database, Place, open_database
from server.journal.reading.queries import Filters, answer, cursor, page, place, stream
from server.journal.retention import prune
from server.journal.schema import ROWS
from tests.server.journal.counting import count, ids
from tests.server.journal.journals import START, Postgres, put, row


def test_a_postgresql_that_knows_no_encoding_keeps_texts(postgres: Postgres) -> None:
    """`initdb` creates such a database where no language is set, for example in a custom container."""
    database = open_database(Place.of(postgres.new("ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")))
    put(database, row(answer="grün"))
    with database.writer.connect() as connection:
        assert connection.execute(select(ROWS.c.answer)).scalar_one() == "grün"
    database.close()


def test_filters_choose_rows(database: Database) -> None:
    put(
        database,
        row(0, model="other"),
        row(1, toward="vision", vectors="|modality-preference|", interventions="|steering|"),
        row(2, toward="text", vectors="|a|modality-preference|", interventions="|steering|"),
        row(3, interventions="|sage.see|sage.generate|"),
        row(4, interventions="|steering|contrast.vcd|", finish_reason="cancelled"),
        row(5, perceptual_blindness=True, dissociation=False),
        row(6, perceptual_blindness=False, dissociation=True, finish_reason="error"),
        row(7, model="toy", toward="other", interventions="|nudge|", readouts='{"norm":2.5,"odd":true,"even":false}'),
    )
    assert ids(database) == [7, 6, 5, 4, 3, 2, 1, 0]
    for filters, expected in (
        ({"model": "other"}, [0]),
        ({"model": "OTHER"}, []),
        ({"vector": "modality-preference"}, [2, 1]),
        ({"vector": "a"}, [2]),
        ({"vector": "A"}, []),
        ({"vector": "modality"}, []),
        ({"vector": "%"}, []),
        ({"toward": "vision"}, [1]),
        ({"toward": "none"}, [6, 5, 4, 3, 0]),
        ({"sage": "see"}, [3]),
        ({"sage": "think"}, []),
        ({"sage": "generate"}, [3]),
        ({"sage": "none"}, [7, 6, 5, 4, 2, 1, 0]),
        ({"contrast": "vcd"}, [4]),
        ({"contrast": "none"}, [7, 6, 5, 3, 2, 1, 0]),
        ({"intervention": "sage.generate"}, [3]),
        ({"intervention": "contrast.vcd", "contrast": "vcd"}, [4]),
        ({"intervention": "steering", "contrast": "none"}, [2, 1]),
        ({"intervention": "nudge"}, [7]),
        ({"intervention": "sage"}, []),
        ({"intervention": "none"}, [6, 5, 0]),
        ({"flag": "odd"}, [7]),
        ({"flag": "even"}, []),
        ({"flag": "perceptual_blindness"}, [5]),
        ({"flag": "dissociation"}, [6]),
        ({"finish_reason": "cancelled"}, [4]),
        ({"since": START + 5}, [7, 6, 5]),
        ({"until": START + 2}, [1, 0]),
        ({"since": START + 1, "until": START + 3, "toward": "text"}, [2]),
    ):
        assert ids(database, Filters(**filters)) == expected, filters  # type: ignore[arg-type]


def test_pages_neither_repeat_nor_lose_rows_while_others_come_and_go(database: Database) -> None:
    put(database, *(row(i) for i in range(10)))
    with database.engine.connect() as connection:
        first = page(connection, Filters(), 4)
    assert [r["id"] for r in first.rows] == ["chatcmpl-9", "chatcmpl-8", "chatcmpl-7", "chatcmpl-6"]
    put(database, row(10), row(11, created=START - 1e6))
    with database.writer.begin() as connection:
        prune(connection, max_rows=10, before=START)  # 11 is too old, and of the rest 0 is one too many
        connection.execute(ROWS.delete().where(ROWS.c.id == "chatcmpl-6"))  # the row that the cursor stands on
    assert first.next is not None
    with database.engine.connect() as connection:
        second = page(connection, Filters(), 4, place(first.next))
        assert [r["id"] for r in second.rows] == ["chatcmpl-5", "chatcmpl-4", "chatcmpl-3", "chatcmpl-2"]
        assert second.next is not None
        last = page(connection, Filters(), 4, place(second.next))
    assert [r["id"] for r in last.rows][:1] == ["chatcmpl-1"]
    assert last.next is None


def test_keys_are_never_used_again(database: Database) -> None:
    put(database, *(row(i) for i in range(5)))
    with database.writer.begin() as connection:
        connection.execute(ROWS.delete())
    put(database, row(5))
    with database.engine.connect() as connection:
        assert connection.execute(select(ROWS.c.key)).scalar_one() == 6


@pytest.mark.parametrize("text", ["", "x", "MQ==", "-1", cursor(2**63), "ZG9n", "LTE", "AA", "é"])
def test_a_cursor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        place(text)
    assert place(cursor(12345)) == 12345


def test_a_stream_holds_every_row_once_and_none_that_came_later(database: Database) -> None:
    put(database, *(row(i) for i in range(1203)))
    chunks = stream(database, Filters())
    found = next(chunks)
    put(database, row(5000))
    found += [r for chunk in chunks for r in chunk]
    assert [r["id"] for r in found] == [f"chatcmpl-{i}" for i in reversed(range(1203))]
    assert sum(map(len, stream(database, Filters(), limit=501))) == 501
    assert list(stream(database, Filters(model="nobody"))) == []


def test_the_choices_of_an_answer_come_in_order(database: Database) -> None:
    put(database, row(1, choice=1), row(1, choice=0), row(2))
    with database.engine.connect() as connection:
        assert [r["choice"] for r in answer(connection, "chatcmpl-1")] == [0, 1]
        assert answer(connection, "chatcmpl-3") == []


def test_rows_are_pruned_by_number_in_bounded_batches(database: Database) -> None:
    put(database, *(row(i) for i in range(50)))
    deleted = []
    while not deleted or deleted[-1] == 8:
        with database.writer.begin() as connection:
            deleted.append(prune(connection, max_rows=20, before=0.0, batch=8))
    assert deleted == [8, 8, 8, 6]
    assert ids(database) == list(range(49, 29, -1))


def test_rows_are_pruned_by_age_whatever_their_order(database: Database) -> None:
    ages = [3, 9, 1, 8, 2]
    put(database, *(row(i, created=START - age) for i, age in enumerate(ages)))
    with database.writer.begin() as connection:
        assert prune(connection, max_rows=100, before=START - 5) == 2
    assert ids(database) == [4, 2, 0]


def test_readers_and_a_second_process_wait_for_a_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "journal.db")
    one, two = open_database(Place.of(path)), open_database(Place.of(path), busy_seconds=0.1)
    with one.writer.begin() as connection:
        connection.execute(ROWS.insert(), [row(1)])
        assert count(two) == 0  # reading does not wait
        with pytest.raises(Exception, match="locked") as caught:
            put(two, row(2))
        assert two.explain(caught.value).reason == "locked"
    put(two, row(2))
    assert ids(one) == [2, 1]
    one.close()
    two.close()


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    database = open_database(Place.of(str(path)))
    assert not database.moved()
    other = tmp_path / "other"
    other.write_bytes(b"")
    os.replace(other, path)
    assert database.moved()
    os.unlink(path)
    assert database.moved()
    database.close()
    with pytest.raises(Exception, match="unable to open") as caught:
        count(database)
    assert database.explain(caught.value).reason == "not_writable"
    assert not path.exists(), "a reader must not make a file anew"
