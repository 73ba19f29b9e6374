"""`helmsight journal`: export, prune and summary without a server."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from server.cli import main
from server.journal.database import Place, open_database
from server.journal.reading.view import refresh
from server.journal.schema import VERSION_TABLE
from tests.server.journal.journals import START, put, row


@pytest.fixture
def journal(place: str) -> str:
    """Return a journal of three old rows and a new one."""
    database = open_database(Place.of(place))
    put(
        database,
        row(0, toward="vision", intervention="steer:vision", dose=0.5, correct=True),
        row(1, metadata='{"user":"a,\\"b\\""}', applied='{"sage":null}', prompt="user: =1+1\nhi", answer="ü"),
        row(
            2,
            perceptual_blindness=True,
            finish_reason="length",
            interventions="|steering|sage.see|",
            readouts='{"norm":2.5}',
        ),
        row(3, created=time.time()),
    )
    database.close()
    return place


def run(*arguments: str) -> int:
    return main(["journal", *arguments])


def test_export_writes_json_lines(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--journal", journal) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["id"] for r in rows] == [f"chatcmpl-{i}" for i in (3, 2, 1, 0)]
    assert rows[2]["metadata"] == {"user": 'a,"b"'}
    for arguments, expected in (
        (("--toward", "vision"), [0]),
        (("--flag", "perceptual_blindness", "--finish-reason", "length"), [2]),
        (("--since", str(START + 1), "--until", "2024-01-01"), [2, 1]),
        (("--limit", "2"), [3, 2]),
        (("--sage", "see"), [2]),
        (("--intervention", "steering", "--contrast", "none"), [2]),
        (("--intervention", "none", "--until", "2024-01-01"), [1, 0]),
        (("--model", "nobody"), []),
    ):
        assert run("export", "--journal", journal, *arguments) == 0
        found = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
        assert found == [f"chatcmpl-{i}" for i in expected], arguments


def test_export_writes_a_table(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--journal", journal, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["id"] for r in rows] == [f"chatcmpl-{i}" for i in (3, 2, 1, 0)]
    assert (rows[3]["dose"], rows[3]["correct"], rows[3]["kl"], rows[1]["perceptual_blindness"]) == (
        "0.5", "True", "", "True",
    )  # fmt: skip
    assert (rows[1]["interventions"], rows[2]["interventions"]) == ("steering sage.see", "")
    assert (rows[2]["prompt"], rows[2]["answer"]) == ("user: =1+1\nhi", "ü")
    assert json.loads(rows[2]["metadata"]) == {"user": 'a,"b"'}


def test_summary_is_a_table_or_json(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("summary", "--journal", journal, "--json") == 0
    assert json.loads(capsys.readouterr().out)["count"] == 4
    assert run("summary", "--journal", journal, "--until", str(START + 100)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 answers (1 length, 2 stop)"
    words = [line.split() for line in lines]
    assert ["dose", "1", "0.5", "0.5", "0.5", "0.5", "0.5", "0.5"] in words
    assert ["steer:vision", "1", "-", "-", "-", "1"] in words
    assert ["perceptual_blindness", "1", "1", "1"] in words
    assert run("summary", "--journal", journal, "--model", "nobody") == 0
    assert capsys.readouterr().out == "0 answers\n"


def test_prune_deletes_what_is_too_old_or_too_many(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prune", "--journal", journal, "--days", "36500", "--max-rows", "3") == 0
    assert capsys.readouterr().out == "1 rows deleted, 3 left\n"
    assert run("prune", "--journal", journal) == 0
    assert capsys.readouterr().out == "2 rows deleted, 1 left\n"
    assert run("prune", "--journal", journal, "--vacuum") == 0
    assert capsys.readouterr().out == "0 rows deleted, 1 left\n"
    assert run("prune", "--journal", journal, "--max-rows", "0") == 2
    assert "journal_max_rows" in capsys.readouterr().err


def test_vacuum_gives_the_space_of_deleted_rows_back(tmp_path: Path) -> None:
    file = tmp_path / "wide.db"
    with closing(open_database(Place.of(str(file)))) as database:
        put(database, *(row(i, prompt="x" * 4000) for i in range(200)))
    before = file.stat().st_size
    assert run("prune", "--journal", str(file), "--max-rows", "1", "--vacuum") == 0
    assert file.stat().st_size < before / 4


def test_what_is_no_journal_is_one_clear_line(tmp_path: Path, journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    database = open_database(Place.of(journal))
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    database.close()
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    garbage = tmp_path / "garbage"
    garbage.write_text("no database")
    for setting, said in (
        (journal, "newer version of Helmsight"),
        (str(tmp_path / "nowhere.db"), "there is no journal"),
        (str(tmp_path), "is a folder"),
        (str(foreign), f"there is no journal ({foreign})"),
        (str(garbage), "not a database"),
        ("off", "switched off"),
    ):
        for command in ("export", "prune", "summary"):
            assert run(command, "--journal", setting) == 1
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith("helmsight: ")
            assert said in captured.err
            assert captured.err.count("\n") == 1
    assert not (tmp_path / "nowhere.db").exists()
    with closing(sqlite3.connect(foreign)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    assert run("export", "--journal", "mysql://u:secret-word@host/x") == 2
    assert "secret-word" not in capsys.readouterr().err
    for arguments, said in (
        (("--since", "yesterday"), "'--since': must be Unix seconds, a date such as 2026-11-21"),
        (("--since", "nan"), "--since"),
        (("--limit", "0"), "--limit"),
        (("--toward", "left"), "must be one of vision, text, other, none; got 'left'"),
        (("--sage", "all"), "must be one of see, think, generate, none; got 'all'"),
        (
            ("--intervention", "sage"),
            "must be one of look_at, sage.see, sage.think, steering, project_out, sage.generate",
        ),
    ):
        assert run("export", "--journal", journal, *arguments) == 2
        assert said in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_and_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    database = open_database(Place.of(str(path)))
    put(database, *(row(i) for i in range(2000)))
    refresh(database)  # as a server does
    database.close()
    code = (
        "import sys; from server.cli import main; status = main(sys.argv[1:]); "
        "print(*(m for m in ('torch', 'flask') if m in sys.modules), file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "journal", "export", "--journal", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith('{"object":"diagnostics.row"')
        process.stdout.close()
        assert process.stderr.read() == "\n"
    assert process.returncode == 0
