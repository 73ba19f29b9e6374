"""The journal's database, in SQLite and in a real PostgreSQL: its schema, older and newer versions, and who may read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text

from server.journal import database as journal_database
from server.journal.database import Database, Place, open_database
from server.journal.errors import JournalError
from server.journal.reading.fields import ADDED_NAMES
from server.journal.reading.queries import Filters, page
from server.journal.schema import ADDED, ROWS, VERSION_TABLE, metadata
from tests.server.journal.counting import ids
from tests.server.journal.journals import put, row


def test_the_migrations_make_what_the_schema_says(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        found = [entry for entry in compare_metadata(context, metadata) if "helmsight" in str(entry)]
    assert found == []


def test_an_older_database_is_migrated_and_keeps_its_rows(database: Database) -> None:
    put(database, row(1), row(2))
    config = Config()
    config.set_main_option("script_location", str(journal_database.MIGRATIONS))
    with (
        database.writer.begin() as connection
    ):  # back to the first revision: without the later indexes, columns and tables
        connection.execute(text("DROP TABLE helmsight_journal_refusals"))
        connection.execute(text("DROP TABLE helmsight_journal_stored"))
        for index in ("helmsight_journal_id", "helmsight_journal_created"):
            connection.execute(text(f"DROP INDEX {index}"))
        later = (column.name for columns in ADDED.values() for column in columns)
        for column in ("interventions", "readouts", "key_name", *later):
            connection.execute(text(f"ALTER TABLE helmsight_journal DROP COLUMN {column}"))
        config.attributes["connection"] = connection
        command.stamp(config, "0001")
    again = open_database(database.place)
    test_the_migrations_make_what_the_schema_says(again)
    assert ids(again) == [2, 1]
    again.close()


@pytest.mark.parametrize("missing", [("source",), tuple(ADDED_NAMES)])
def test_columns_that_its_own_revision_lacks_are_added(database: Database, missing: tuple[str, ...]) -> None:
    """A journal of a development version has the newest revision without columns that were added to an older one later."""
    put(database, row(1))
    with database.writer.begin() as connection:
        for column in missing:
            connection.execute(text(f"ALTER TABLE helmsight_journal DROP COLUMN {column}"))
    again = open_database(database.place)
    test_the_migrations_make_what_the_schema_says(again)
    put(again, row(2))
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
    new = {"interventions", "readouts", *ADDED_NAMES}
    with first.writer.begin() as connection:
        connection.execute(text("DROP TABLE helmsight_journal"))
        connection.execute(text("DROP TABLE helmsight_journal_refusals"))
        connection.execute(text("DROP TABLE helmsight_journal_stored"))
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
    with database.writer.begin() as connection:
        asked = row(8, sage_see=True, vectors="|v|", contrast="vcd")
        connection.execute(ROWS.insert(), {name: value for name, value in asked.items() if name not in new})
    for filters in (Filters(sage="see"), Filters(contrast="vcd"), Filters(intervention="steering")):
        assert ids(database, filters)[0] == 8, filters
    assert ids(database, Filters(intervention="none")) == [7, 0]
    with database.engine.connect() as connection:
        shown = page(connection, Filters(), 1).rows[0]
    assert shown["interventions"] == ["steering", "sage.see", "contrast.vcd"]
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
