"""The source of a request: benchmarks against a server are told apart from its live traffic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flask import Flask

import steering
from demo.draws import DRAWS
from probes.answering.base import Question
from probes.answering.endpoint import SOURCE, Endpoint
from probes.vector.reliability import task_reliability
from server.api.chats import chat
from server.cli import main
from server.journal.database import Database
from server.journal.reading.queries import Filters
from server.journal.summary import summarise
from server.journal.words import SOURCES
from tests.server.api.test_operations import samples, total
from tests.server.conftest import ask
from tests.server.journal.counting import ids
from tests.server.journal.journals import put, row
from tests.server.journal.rows import Serve, journal_of, rows_of


def test_the_questions_of_a_benchmark_are_marked_and_counted_apart(
    serve: Serve, live: Callable[[Flask], str], capsys: pytest.CaptureFixture[str]
) -> None:
    client = serve()
    assert ask(client, "What?", max_tokens=2).status_code == 200
    endpoint = Endpoint(live(client.application))
    questions = [Question([{"role": "user", "content": text}], max_tokens=2) for text in ("Why?", "How?")]
    assert len(list(endpoint.answers(questions))) == 2
    rows = rows_of(client, 3)
    assert [one["source"] for one in rows] == ["eval", "eval", "live"]
    for source, count in (("eval", 2), ("live", 1), ("probe", 0)):
        listed = client.get(f"/v1/diagnostics?source={source}").json
        assert listed is not None
        assert [one["source"] for one in listed["data"]] == [source] * count
        summary = client.get(f"/v1/diagnostics/summary?source={source}").json
        assert summary is not None
        assert (summary["count"], summary["sources"]) == (count, {source: count} if count else {})
        assert total(samples(client), "helmsight_choices_total", source=source) == count
    whole = client.get("/v1/diagnostics/summary").json
    assert whole is not None
    assert whole["sources"] == {"eval": 2, "live": 1}
    refused = client.get("/v1/diagnostics?source=mine")
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "source")  # type: ignore[index]

    journal_of(client).close()
    place = str(client.application.extensions["helmsight"].settings.journal.get_secret_value())
    assert main(["journal", "export", "--journal", place, "--source", "eval"]) == 0
    exported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["source"] for one in exported] == ["eval", "eval"]
    assert main(["journal", "summary", "--journal", place]) == 0
    assert "2 eval, 1 live" in capsys.readouterr().out


def test_the_reliability_of_a_servers_model_is_that_of_its_engine_and_counts_as_a_probe(
    serve: Serve, live: Callable[[Flask], str], engine: steering.Engine, tmp_path: Path
) -> None:
    client = serve()
    file = tmp_path / "votes.json"
    command = ["probe", "reliability", "--samples", "3", "--seed", "7", "--quiet", "--json", str(file)]
    assert main([*command, "--base-url", live(client.application)]) == 0
    found = json.loads(file.read_text())
    expected = {
        task: one.to_json() for task, one in task_reliability(engine, DRAWS["conflicts"](3, 7), quiet=True).items()
    }
    assert found.keys() == expected.keys()
    for task, numbers in expected.items():
        assert (found[task]["votes"], found[task]["rests_on"]) == (dict(numbers["votes"]), numbers["rests_on"])
        for name in ("drop_vision", "drop_text"):
            assert found[task][name] == pytest.approx(numbers[name], rel=1e-3, abs=1e-6)
    assert {one["source"] for one in rows_of(client, 6)} == {"probe"}


def test_rows_of_an_older_server_count_as_live(database: Database) -> None:
    put(database, row(1, source=None), row(2, source="live"), row(3, source="eval"))
    assert ids(database, Filters(source="live")) == [2, 1]
    assert ids(database, Filters(source="eval")) == [3]
    with database.engine.connect() as connection:
        assert summarise(connection, Filters())["sources"] == {"eval": 1, "live": 2}


def test_a_benchmark_and_a_server_agree_on_the_header() -> None:
    assert chat.SOURCE == SOURCE
    assert "eval" in SOURCES
