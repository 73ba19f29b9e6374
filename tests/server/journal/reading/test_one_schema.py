"""HTTP, JSON Lines, CSV, Parquet and SQL show the same fields under the same names, nulls included."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from server.cli import main
from server.journal.database import Database, Place, open_database
from server.journal.reading import view
from server.journal.reading.fields import SAMPLING, columns, shown
from server.journal.reading.queries import Filters, page
from server.journal.schema import ROWS
from steering import Sampling
from steering.protocol import readout
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine
from tests.server.journal.counting import ids
from tests.server.journal.journals import put, row
from tests.server.journal.rows import Serve, database_of, journal_of, rows_of

GROUPS = ("sampling", "usage", "latency", "diagnostics", "texts")


def leaves(shown_row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row in JSON, by the names of its leaves."""
    found = {name: value for name, value in shown_row.items() if name not in (*GROUPS, "object")}
    for group in GROUPS:
        assert not shown_row[group].keys() & found.keys(), "a name is used once"
        found |= shown_row[group]
    return found


def cell(value: Any) -> str:
    """Return how a table writes a value."""
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return "" if value is None else str(value)


@pytest.fixture
def path(serve: Serve, tmp_path: Path) -> str:
    """Return a journal with an answer that has most fields, and one that has few."""
    client = serve(journal_texts=True)
    everything = {
        "metadata": {"answer_correct": "true", "a": "b"},
        "steering": {"toward": "vision"},
        "top_k": 5,
        "seed": 3,
    }
    assert (
        ask(client, data_uri(), "What?", diagnostics=True, model="helmsight-demo@sage", **everything).status_code == 200
    )
    assert ask(client, "Why?").status_code == 200
    rows_of(client, 2)
    return str(journal_of(client)._setting)


def test_every_form_has_the_same_fields_and_values(path: str, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    client = serve(journal=path)
    http = [leaves(one) for one in client.get("/v1/diagnostics").json["data"]]
    names = list(columns(view.scalars()))
    assert [sorted(one) for one in http] == [sorted(names)] * 2
    assert http[1]["answer_correct"] is True
    assert (http[1]["preset"], http[1]["top_k"], http[1]["toward"], http[1]["vectors"]) == (
        "sage", 5, "vision", ["modality-preference"],
    )  # fmt: skip
    assert http[0]["attention_ratio"] is http[0]["mean_logprob"] is http[0]["metadata"] is None

    assert [json.loads(one) for one in client.get("/v1/diagnostics?format=jsonl").text.splitlines()] == client.get(
        "/v1/diagnostics"
    ).json["data"]
    assert main(["journal", "export", "--journal", path]) == 0
    assert [leaves(json.loads(one)) for one in capsys.readouterr().out.splitlines()] == http

    told = client.get("/v1/diagnostics?format=csv").text
    assert main(["journal", "export", "--journal", path, "--format", "csv"]) == 0
    assert capsys.readouterr().out.replace("\r\n", "\n") == told.replace("\r\n", "\n")
    head, *tabled = csv.reader(io.StringIO(told, newline=""))
    assert head == names
    assert tabled == [[cell(one[name]) for name in names] for one in http]

    with database_of(client).engine.connect() as connection:
        sql = connection.execute(text("SELECT * FROM helmsight_answers ORDER BY created DESC")).mappings().all()
    assert [list(one) for one in sql] == [names] * 2
    for found, wanted in zip(sql, http, strict=True):
        for name in names:
            value = wanted[name]
            same = found[name] == value if isinstance(value, bool | int | float | None) else found[name] == cell(value)
            assert same, (name, found[name], value)


def test_the_view_says_the_same_in_both_databases(database: Database) -> None:
    given = {
        "vectors": "|a|b|", "interventions": "|steering|", "sampling": '{"temperature":0.5,"seed":9007199254740993,"n":2}',
        "readouts": '{"alarm":true,"alarm_score":-1.5}', "created": time.time(), "answer_correct": False,
    }  # fmt: skip
    put(database, row(1, **given), row(2))
    assert view.view_numbers(database) == tuple(view.scalars()), "made where it was missing"
    with database.engine.connect() as connection:
        first, second = connection.execute(text("SELECT * FROM helmsight_answers ORDER BY id")).mappings().all()
    assert tuple(first) == columns(view.scalars())
    assert (first["vectors"], first["interventions"], second["vectors"]) == ("a b", "steering", "")
    assert (first["temperature"], first["seed"], first["top_k"]) == (0.5, 9007199254740993, None)
    assert (bool(first["alarm"]), first["alarm_score"], second["alarm"]) == (True, -1.5, None)
    assert (bool(first["answer_correct"]), second["answer_correct"]) == (False, None)


def test_a_new_readout_appears_in_every_form(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "brightness" not in view.refresh(database)

    put(database, row(1, readouts='{"brightness":0.5}'))
    monkeypatch.setitem(readout.REGISTRY, "brightness", SimpleNamespace(scalars={"brightness": float}))
    assert "brightness" in view.refresh(database)
    assert view.view_numbers(database)[-1] == "brightness"
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT brightness FROM helmsight_answers")).scalar_one() == 0.5


def test_the_view_is_read_without_torch(path: str) -> None:
    code = (
        "import sys; from server.cli import main; status = main(sys.argv[1:]); "
        "print(status, 'torch' in sys.modules, file=sys.stderr)"
    )
    for form in ("jsonl", "csv"):
        command = [sys.executable, "-c", code, "journal", "export", "--journal", path, "--format", form]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stderr.split() == ["0", "False"]
        assert "mean_logprob" in done.stdout


def test_parquet_has_a_type_for_every_field(path: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    from server.journal.reading.parquet import write_parquet

    database = open_database(Place.of(path))
    with (tmp_path / "rows.parquet").open("wb") as file, database.engine.connect() as connection:
        rows = page(connection, Filters(), 10, scalars=view.view_numbers(database)).rows
        write_parquet(file, [rows[:1], rows[1:]])
    database.close()
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column_names == list(columns(view.scalars()))
    kinds = {
        name: str(table.schema.field(name).type) for name in ("id", "created", "seed", "kl", "dissociation", "alarm")
    }
    assert kinds == {
        "id": "string", "created": "double", "seed": "int64", "kl": "double", "dissociation": "bool", "alarm": "bool",
    }  # fmt: skip
    for found, wanted in zip(table.to_pylist(), map(leaves, map(texts_shown, rows)), strict=True):
        for name, value in found.items():
            other = wanted[name]
            assert value == (cell(other) if isinstance(other, list | dict) else other), name


def texts_shown(shown_row: dict[str, Any]) -> dict[str, Any]:
    return shown_row | {"texts": shown_row["texts"] or {"prompt": None, "answer": None}}


def test_without_pyarrow_it_is_said_what_to_install(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.journal.reading.parquet.find_spec", lambda name: None)
    assert main(["journal", "export", "--journal", path, "--format", "parquet"]) == 1
    assert "pip install 'helmsight[parquet]'" in capsys.readouterr().err


def test_the_sampling_values_are_those_of_the_engine() -> None:
    optional = {"max_tokens", "seed", "logprobs"}
    numbers = {name for name, value in vars(Sampling()).items() if isinstance(value, int | float)} | optional
    assert numbers | {"n"} == set(SAMPLING)


def test_every_column_of_rows_is_shown_or_follows_from_another(database: Database) -> None:
    put(database, row(1))
    with database.engine.connect() as connection:
        found = leaves(texts_shown(shown(connection.execute(ROWS.select()).mappings().one(), ())))
    derived = {
        "key",
        "hour",
        "intervention",
        "contrast",
        "sage_see",
        "sage_think",
        "sage_generate",
        "sampling",
        "readouts",
    }
    assert {column.name for column in ROWS.c} - derived <= found.keys()


@pytest.mark.parametrize("form", ["http", "command"])
def test_rows_are_filtered_by_metadata_preset_and_times_as_people_write_them(
    form: str, fake: FakeEngine, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    client = serve(fake, journal_days=1e4)
    now, day = time.time(), 86_400
    put(
        database_of(client),
        row(1, created=now - 60, metadata='{"shop":"a","n":"1"}'),
        row(2, created=now - 2 * day, metadata='{"shop":"a"}', preset="sage"),
        row(3, created=now - 10 * day, metadata='{"shop":"b"}'),
        row(4, created=1_700_000_000.0),
    )

    def found(**filters: str) -> list[int]:
        if form == "http":
            query = {f"metadata[{key}]" if key in ("shop", "n") else key: value for key, value in filters.items()}
            response = client.get("/v1/diagnostics", query_string=query)
            assert response.status_code == 200, response.text
            listed = [one["id"] for one in response.json["data"]]
        else:
            flags = [
                word
                for key, value in filters.items()
                for word in (("--metadata", f"{key}={value}") if key in ("shop", "n") else (f"--{key}", value))
            ]
            assert main(["journal", "export", "--journal", journal_of(client)._setting, *flags]) == 0
            listed = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
        return sorted(int(one.removeprefix("chatcmpl-")) for one in listed)

    assert found(shop="a") == [1, 2]
    assert found(shop="a", n="1") == [1]
    assert found(preset="sage") == [2]
    assert found(since="1d") == found(since="1.5d") == [1]
    assert found(since="3d", until="1h") == [2]
    assert found(since="2w") == [1, 2, 3]
    assert found(until="2023-11-16") == found(since="2023-11-13T00:00:00+00:00", until="2023-11-15T23:00:00Z") == [4]
    assert found(since="1699999999", until="1700000001") == [4]


def test_a_summary_takes_the_same_filters(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, journal_days=1e4)
    put(database_of(client), row(1, metadata='{"shop":"a"}', created=time.time()), row(2, created=time.time()))
    assert client.get("/v1/diagnostics/summary?metadata[shop]=a&since=1d").json["count"] == 1
    assert client.get("/v1/diagnostics/summary?since=1d").json["count"] == 2


def test_filters_by_metadata_in_both_databases(database: Database) -> None:
    put(database, row(1, metadata='{"a":"b"}'), row(2, metadata=None), row(3, metadata='{"a":"bb","c":"d"}'))
    assert ids(database, Filters(metadata=(("a", "b"),))) == [1]
    assert ids(database, Filters(metadata=(("a", "bb"), ("c", "d")))) == [3]
    assert ids(database, Filters(metadata=(("a", "b"), ("c", "d")))) == []


def test_a_row_names_its_request_and_its_trace(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}]},
        headers={"X-Request-Id": "mine", "traceparent": parent},
    )
    (found,) = rows_of(client, 1)
    assert (found["request_id"], found["trace_id"], found["span_id"]) == ("mine", parent[3:35], None)
    ask(client)
    assert rows_of(client, 2)[0]["trace_id"] is None
