"""The journal's database, the same tests in SQLite and in a real PostgreSQL: schema, filters, pages, summary, retention."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, select, text

from server.encode import dumps
from server.journal import database as journal_database
from server.journal.database import Database, Place, open_database
from server.journal.errors import JournalError
from server.journal.queries import Filters, answer, cursor, page, place, stream
from server.journal.retention import prune
from server.journal.schema import ROWS, VERSION_TABLE, metadata
from server.journal.summary import summarise
from tests.server.journal.journals import HOUR, START, put, row


def ids(database: Database, filters: Filters | None = None, limit: int = 100) -> list[int]:
    """The numbers of the rows that match, newest first."""
    with database.engine.connect() as connection:
        return [int(r["id"].removeprefix("chatcmpl-")) for r in page(connection, filters or Filters(), limit).rows]


def count(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(ROWS)).scalar_one())


def test_the_migrations_make_what_the_schema_says(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        found = [entry for entry in compare_metadata(context, metadata) if "helmsight" in str(entry)]
    assert found == []


def test_an_older_database_is_migrated_and_keeps_its_rows(database: Database) -> None:
    put(database, row(1), row(2))
    config = Config()
    config.set_main_option("script_location", str(journal_database.MIGRATIONS))
    with database.writer.begin() as connection:  # back to the first revision: two indexes and two columns fewer
        for index in ("helmsight_journal_id", "helmsight_journal_created"):
            connection.execute(text(f"DROP INDEX {index}"))
        for column in ("interventions", "readouts"):
            connection.execute(text(f"ALTER TABLE helmsight_journal DROP COLUMN {column}"))
        config.attributes["connection"] = connection
        command.stamp(config, "0001")
    again = open_database(database.place)
    test_the_migrations_make_what_the_schema_says(again)
    assert ids(again) == [2, 1]
    again.close()


OLD = {
    "|": {"contrast": "none"},
    "|steering|": {"vectors": "|a|modality-preference|", "toward": "vision"},
    "|sage.think|": {"sage_think": True},
    "|sage.see|sage.generate|": {"sage_see": True, "sage_generate": True},
    "|steering|sage.see|sage.think|sage.generate|": {
        "vectors": "|a|",
        **dict.fromkeys(("sage_see", "sage_think", "sage_generate"), True),
    },
    "|contrast.icd|": {"contrast": "icd"},
    "|steering|contrast.vcd|": {"vectors": "|a|", "contrast": "vcd"},
}
"""The interventions that rows of the version before had, by their names, and how their columns told of them."""


def test_rows_of_the_version_before_are_found_by_the_names_of_their_interventions(place: str) -> None:
    first = open_database(Place.of(place))
    config = Config()
    config.set_main_option("script_location", str(journal_database.MIGRATIONS))
    new = {"interventions", "readouts"}
    with first.writer.begin() as connection:
        connection.execute(text("DROP TABLE helmsight_journal"))
        connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        for number, columns in enumerate(OLD.values()):
            old = {name: value for name, value in row(number, **columns).items() if name not in new}
            places = ", ".join(f":{name}" for name in old)
            connection.execute(text(f"INSERT INTO helmsight_journal ({', '.join(old)}) VALUES ({places})"), old)
    first.close()

    database = open_database(Place.of(place))
    with database.engine.connect() as connection:
        found = connection.execute(select(ROWS).order_by(ROWS.c.key)).mappings().all()
    assert [one["interventions"] for one in found] == list(OLD)
    for one, (number, columns) in zip(found, enumerate(OLD.values()), strict=True):
        assert {name: one[name] for name in row() if name != "interventions"} == {
            name: value for name, value in row(number, **columns).items() if name != "interventions"
        }
    assert ids(database, Filters(sage="see")) == [4, 3]
    assert ids(database, Filters(intervention="steering")) == [6, 4, 1]
    with database.writer.begin() as connection:  # a server of the version before, beside this one, goes on writing
        old = {name: value for name, value in row(7).items() if name not in new}
        connection.execute(ROWS.insert(), old)
    assert ids(database, Filters(intervention="none")) == [7, 0]
    database.close()


def test_a_newer_database_is_refused_untouched(database: Database) -> None:
    put(database, row(1))
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(JournalError, match=r"newer version of Helmsight .*9999") as caught:
        open_database(database.place)
    assert caught.value.reason == "newer_version"
    assert ids(database) == [1]


def test_the_file_and_its_folder_are_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a %41 journal?#.db"
    database = open_database(Place.of(str(path)))
    put(database, row())
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, *path.parent.iterdir())}
    assert modes.pop("new") == 0o700
    assert modes.keys() == {path.name + end for end in ("", "-wal", "-shm")}
    assert set(modes.values()) == {0o600}
    database.close()


def test_what_is_no_database_is_refused_with_a_reason(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no database at all" * 100)
    below_a_file = garbage / "journal.db"
    for setting, reason in (
        (str(tmp_path), "not_a_database"),
        (str(garbage), "not_a_database"),
        (str(below_a_file), "not_writable"),
        ("mysql://u:secret-word@host/x", "bad_url"),
        ("postgresql://u:secret-word@host:port/x", "bad_url"),
        ("sqlite://", "bad_url"),
    ):
        with pytest.raises(JournalError) as caught:
            open_database(Place.of(setting))
        assert caught.value.reason == reason
        assert "secret-word" not in str(caught.value)
    assert garbage.read_bytes() == b"no database at all" * 100


def test_passwords_show_nowhere() -> None:
    pytest.importorskip("psycopg")
    for url in (
        "postgresql://u:secret-word@127.0.0.1:1/x",
        "postgresql://u@127.0.0.1:1/x?password=secret-word",
        "postgresql+psycopg://u:secret-word@127.0.0.1:1/x?sslpassword=secret-word&nonsense=1",
    ):
        with pytest.raises(JournalError) as caught:
            open_database(Place.of(url))
        assert "secret-word" not in str(caught.value) + Place.of(url).shown
        assert caught.value.__cause__ is None


def test_filters_choose_rows(database: Database) -> None:
    put(
        database,
        row(0, model="other"),
        row(1, toward="vision", vectors="|modality-preference|"),
        row(2, toward="text", vectors="|a|modality-preference|"),
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
        ({"intervention": "steering", "contrast": "none"}, []),
        ({"intervention": "nudge"}, [7]),
        ({"intervention": "sage"}, []),
        ({"intervention": "none"}, [6, 5, 2, 1, 0]),
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


def known_rows() -> list[dict[str, Any]]:
    """Eleven answers in two hours whose statistics are easily computed by hand."""
    rows = [row(i, attention_ratio=i / 10, total=1.0 + i, completion_tokens=i) for i in range(10)]
    rows[0] |= {
        "intervention": "steer:vision",
        "dose": 0.5,
        "focus_share": 0.2,
        "correct": True,
        "answer_correct": True,
    }
    rows[1] |= {
        "intervention": "steer:vision",
        "dose": 1.0,
        "focus_share": 0.4,
        "correct": False,
        "answer_correct": True,
    }
    rows[2] |= {"intervention": "sage", "correct": False, "answer_correct": True, "perceptual_blindness": True}
    rows[3] |= {"correct": False, "answer_correct": False, "perceptual_blindness": False, "dissociation": True}
    rows[4] |= {"answer_correct": True, "finish_reason": "length"}
    rows.append(row(10, created=START + 7205, finish_reason="error", first_token=None, completion_tokens=None, kl=2.0))
    return rows


def test_the_summary_of_known_rows(database: Database) -> None:
    put(database, *known_rows())
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(since=START))
    assert json.loads(json.dumps(found)) == found  # no Decimals
    assert {name: found[name] for name in ("object", "since", "until", "count", "sampled", "finish_reasons")} == {
        "object": "diagnostics.summary",
        "since": START,
        "until": None,
        "count": 11,
        "sampled": 11,
        "finish_reasons": {"error": 1, "length": 1, "stop": 9},
    }
    values = found["values"]
    # 0, 0.1 ... 0.9: ten numbers; p10 lies at rank 0.9, p50 at 4.5, p90 at 8.1
    ratio = {"count": 10, "mean": 0.45, "min": 0.0, "p10": 0.09, "p50": 0.45, "p90": 0.81, "max": 0.9}
    assert values["attention_ratio"] == pytest.approx(ratio)
    assert values["dose"] == pytest.approx(
        {"count": 2, "mean": 0.75, "min": 0.5, "p10": 0.55, "p50": 0.75, "p90": 0.95, "max": 1.0}
    )
    assert values["kl"] == {"count": 1, "mean": 2, "min": 2, "p10": 2, "p50": 2, "p90": 2, "max": 2}
    assert values["decay_slope"] == {"count": 0} | dict.fromkeys(("mean", "min", "p10", "p50", "p90", "max"))
    assert (values["completion_tokens"]["count"], values["completion_tokens"]["mean"]) == (10, 4.5)
    # 1 ... 10 and 0.2, sorted: 0.2, 1, 2, ... 10
    assert values["total"] == pytest.approx(
        {"count": 11, "mean": 55.2 / 11, "min": 0.2, "p10": 1.0, "p50": 5.0, "p90": 9.0, "max": 10.0}
    )
    assert values["first_token"]["count"] == 10
    assert found["flags"] == {
        "perceptual_blindness": {"known": 2, "raised": 1},
        "dissociation": {"known": 1, "raised": 1},
    }
    assert found["focus"] == {"known": 4, "correct": 1, "accuracy": 0.25}
    assert found["ivm"] == {"known": 3, "implicit": 2, "rate": pytest.approx(2 / 3)}
    nothing, steered, sage = found["by_intervention"]
    assert (nothing["intervention"], nothing["count"], nothing["accuracy"]) == ("none", 8, 0.0)
    assert nothing["attention_ratio"] == pytest.approx(4.2 / 7)  # 0.3 to 0.9, and one without
    assert steered == {
        "intervention": "steer:vision",
        "count": 2,
        "attention_ratio": pytest.approx(0.05),
        "focus_share": pytest.approx(0.3),
        "decay_slope": None,
        "accuracy": 0.5,
    }
    assert (sage["intervention"], sage["accuracy"]) == ("sage", 0.0)
    assert found["by_hour"] == [
        {
            "start": HOUR * 3600,
            "count": 10,
            "attention_ratio": pytest.approx(0.45),
            "focus_share": pytest.approx(0.3),
            "decay_slope": None,
            "perceptual_blindness": 1,
            "dissociation": 1,
        },
        {
            "start": (HOUR + 2) * 3600,
            "count": 1,
            **dict.fromkeys(("attention_ratio", "focus_share", "decay_slope")),
            "perceptual_blindness": 0,
            "dissociation": 0,
        },
    ]


def test_the_summary_of_many_rows_is_of_the_newest_and_says_so(database: Database) -> None:
    put(database, *(row(i, kl=float(i), toward=("vision", "none")[i % 2]) for i in range(10)))
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(toward="vision"), sample=3)
    assert (found["count"], found["sampled"]) == (5, 3)
    assert (found["values"]["kl"]["min"], found["values"]["kl"]["max"]) == (4, 8)
    assert sum(hour["count"] for hour in found["by_hour"]) == 3


def test_the_summary_of_readouts_without_columns(database: Database) -> None:
    said = [{"length": 4, "odd": True}, {"length": 1.5, "odd": None}, {"length": None, "odd": False}, {"odd": True}]
    put(
        database, *(row(i, readouts=dumps(one)) for i, one in enumerate(said)), row(4), row(5, readouts='{"length":-1}')
    )
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(since=START, until=START + 5))
    lengths = {"count": 2, "mean": 2.75, "min": 1.5, "p10": 1.75, "p50": 2.75, "p90": 3.75, "max": 4.0}
    assert found["values"]["length"] == pytest.approx(lengths)
    counted = [name for name, value in found["values"].items() if value["count"]]
    assert counted == ["first_token", "total", "completion_tokens", "length"]
    assert found["flags"]["odd"] == {"known": 3, "raised": 2}
    assert found["flags"]["dissociation"] == {"known": 0, "raised": 0}


def test_the_summary_of_nothing(database: Database) -> None:
    with database.engine.connect() as connection:
        found = summarise(connection, Filters())
    assert (found["count"], found["finish_reasons"], found["by_intervention"], found["by_hour"]) == (0, {}, [], [])
    assert found["ivm"] == {"known": 0, "implicit": 0, "rate": None}
    assert found["values"]["kl"]["p50"] is None


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
