"""The routes that show the journal: pages, filters, wrong parameters, the key, and the metrics."""

from __future__ import annotations

import csv
import io
import json
import time

import pytest
from pydantic import SecretStr

from server.api import journal as routes
from server.journal.writer import HEAVY
from steering.protocol.intervention import REGISTRY
from tests.server.api.test_operations import samples, total
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import put, row
from tests.server.journal.rows import Serve, database_of, rows_of
from tests.waiting import wait_for

CONTRASTS = [name.removeprefix("contrast.") for name in REGISTRY if name.startswith("contrast.")]


def test_pages_follow_one_another(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    asked = [ask(client).json["id"] for _ in range(7)]
    rows_of(client, 7)
    found, query = [], "limit=3"
    while query:
        page = client.get(f"/v1/diagnostics?{query}").json
        assert page.keys() == {"object", "data", "has_more", "next"}
        assert page["has_more"] == (page["next"] is not None)
        found.append([row["id"] for row in page["data"]])
        query = f"limit=3&before={page['next']}" if page["has_more"] else ""
    assert [len(ids) for ids in found] == [3, 3, 1]
    assert [identity for ids in found for identity in ids] == asked[::-1]
    response = client.get("/v1/diagnostics?format=jsonl&finish_reason=stop")
    assert response.mimetype == "application/x-ndjson"
    assert [json.loads(line)["id"] for line in response.text.splitlines()] == asked[::-1]
    assert len(client.get("/v1/diagnostics?format=jsonl&limit=2").text.splitlines()) == 2
    assert client.get("/v1/diagnostics?format=jsonl&model=nobody").text == ""
    assert client.get("/v1/diagnostics").json["data"] == client.get("/v1/diagnostics?limit=50").json["data"]


def test_streams_that_are_left_give_their_place_back(
    fake: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "PATIENCE", 0.05)
    client = serve(fake)
    for _ in range(2 * HEAVY):
        client.get("/v1/diagnostics?format=jsonl", buffered=False).close()
        client.get("/v1/diagnostics/summary").close()
    held = [client.get("/v1/diagnostics?format=jsonl", buffered=False) for _ in range(HEAVY)]
    busy = [client.get(f"/v1/diagnostics{route}") for route in ("?format=jsonl", "/summary")]
    assert [(r.status_code, r.json["error"]["code"]) for r in busy] == [(503, "journal_busy")] * 2
    assert client.get("/v1/diagnostics").status_code == 200
    for response in held:
        response.close()
    assert client.get("/v1/diagnostics/summary").status_code == 200


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ("colour=red", "colour", "allowed: since, until"),
        ("limit=0", "limit", "from 1 to 1000"),
        ("limit=1001", "limit", "from 1 to 1000"),
        ("limit=%C2%B2", "limit", "from 1 to 1000"),
        ("limit=1&limit=2", "limit", "once"),
        ("before=zzz", "before", "'next'"),
        ("since=yesterday", "since", "Unix seconds, a date"),
        ("until=nan", "until", "Unix seconds"),
        ("since=-1", "since", "Unix seconds"),
        ("until=1e300", "until", "Unix seconds"),
        ("since=1y", "since", "an age such as"),
        ("since=2026-13-01", "since", "a date such as"),
        ("metadata=a", "metadata", "metadata[key]=value"),
        ("toward=left", "toward", "vision, text"),
        ("sage=all", "sage", "see, think, generate, none"),
        ("contrast=red", "contrast", f"{', '.join(CONTRASTS)}, none"),
        ("intervention=sage", "intervention", "sage.see, sage.think, steering, project_out, sage.generate"),
        ("flag=red", "flag", "perceptual_blindness, dissociation"),
        ("finish_reason=done", "finish_reason", "cancelled"),
        ("format=xml", "format", "json, jsonl, csv"),
        ("model=", "model", "1 to 256"),
        ("vector=%00", "vector", "1 to 256"),
        ("model=" + "x" * 257, "model", "1 to 256"),
    ],
)
def test_wrong_parameters_are_named(fake: FakeEngine, serve: Serve, query: str, param: str, said: str) -> None:
    client = serve(fake)
    response = client.get(f"/v1/diagnostics?{query}")
    assert (response.status_code, response.json["error"]["param"]) == (400, param)
    assert said in response.json["error"]["message"]
    if param not in ("limit", "before", "format"):
        assert client.get(f"/v1/diagnostics/summary?{query}").status_code == 400


def test_rows_as_a_table(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, journal_texts=True)
    for text in ("one", 'with "quotes", commas\nand lines'):
        assert ask(client, text, metadata={"run": "7"}).status_code == 200
    rows = rows_of(client, 2)
    response = client.get("/v1/diagnostics?format=csv")
    assert response.content_type == "text/csv; charset=utf-8"
    found = list(csv.DictReader(io.StringIO(response.text, newline="")))
    assert [one["id"] for one in found] == [row["id"] for row in rows]
    assert [one["prompt"] for one in found] == [row["texts"]["prompt"] for row in rows]
    assert float(found[0]["total"]) == rows[0]["latency"]["total"]
    assert json.loads(found[0]["metadata"]) == {"run": "7"}
    assert found[0]["kl"] == ""
    limited = client.get("/v1/diagnostics?format=csv&limit=1&finish_reason=stop").text
    assert len(list(csv.reader(io.StringIO(limited, newline="")))) == 2
    assert client.get("/v1/diagnostics?format=csv&model=none").text == response.text.splitlines()[0] + "\r\n"


def test_no_text_of_a_table_begins_a_formula_and_numbers_stay_numbers(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, journal_days=1e4)
    risky = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "＋1", "－1", "＠1"]
    harmless = ["", " =1", "a=1", "'=1", "1-1", "…=1", '"=1"']
    texts = [*risky, *harmless]
    put(
        database_of(client),
        *(row(i, answer=text, decay_slope=-0.5, kl=-1e-9, created=time.time()) for i, text in enumerate(texts)),
    )
    table = client.get("/v1/diagnostics?format=csv").text
    found = list(csv.DictReader(io.StringIO(table, newline="")))[::-1]
    assert [one["answer"] for one in found] == [*(f"'{text}" for text in risky), *harmless]
    assert {(one["decay_slope"], one["kl"]) for one in found} == {("-0.5", "-1e-09")}
    lines = client.get("/v1/diagnostics?format=jsonl").text.splitlines()[::-1]
    assert [json.loads(line)["texts"]["answer"] for line in lines] == texts


@pytest.mark.parametrize("bucket", ["0", "59", "90", "x", "-60", "99999960"])
def test_a_period_is_some_minutes(fake: FakeEngine, serve: Serve, bucket: str) -> None:
    client = serve(fake)
    response = client.get(f"/v1/diagnostics/summary?bucket={bucket}")
    assert (response.status_code, response.json["error"]["param"]) == (400, "bucket")
    assert client.get("/v1/diagnostics/summary?bucket=120").json["by_time"] == {"bucket": 120, "rows": []}


def test_unknown_answers_and_foreign_parameters(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    for identity in ("chatcmpl-0", "%00", "x" * 5000):
        response = client.get(f"/v1/diagnostics/{identity}")
        assert (response.status_code, response.json["error"]["code"]) == (404, "unknown_answer")
    assert client.get("/v1/diagnostics/chatcmpl-0?limit=1").status_code == 400
    assert client.get("/v1/diagnostics/summary?limit=1").json["error"]["code"] == "unknown_parameter"
    assert client.post("/v1/diagnostics").status_code == 405


def test_the_journal_needs_the_key(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, api_keys=(SecretStr("secret-key"),))
    for route in ("", "/summary", "/chatcmpl-0"):
        assert client.get(f"/v1/diagnostics{route}").status_code == 401
    assert client.get("/v1/diagnostics", headers={"Authorization": "Bearer secret-key"}).status_code == 200


def test_a_table_that_is_gone_is_a_503(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    database = database_of(client)
    with database.writer.begin() as connection:
        connection.exec_driver_sql("DROP TABLE helmsight_journal")
    for route in ("", "?format=jsonl", "/summary", "/chatcmpl-0"):
        response = client.get(f"/v1/diagnostics{route}")
        assert (response.status_code, response.json["error"]["code"]) == (503, "journal_unavailable")
        assert "SELECT" not in response.text
    assert ask(client).status_code == 200
    wait_for(lambda: client.get("/ready").json["journal"]["state"] == "failing")


def test_metrics_count_rows_flags_and_numbers(fake: FakeEngine, serve: Serve) -> None:
    fake.diagnostics = {
        "focus": {"image": 1, "share": 0.75, "target_image": None, "correct": None},
        "decay": {"slope": -0.002},
        "flags": {"perceptual_blindness": True, "dissociation": None},
    }
    client = serve(fake)
    ask(client)
    rows_of(client, 1)
    found = samples(client)
    assert total(found, "helmsight_focus_share_sum") == 0.75
    slopes = [total(found, "helmsight_decay_slope_bucket", le=edge) for edge in ("-0.003", "-0.001", "+Inf")]
    assert slopes == [0, 1, 1]
    assert total(found, "helmsight_attention_ratio_count") == total(found, "helmsight_dose_count") == 0
    assert total(found, "helmsight_flags_total", flag="perceptual_blindness", raised="true") == 1
    assert not any("dissociation" in name for name in found)
    assert found["helmsight_journal_up"] == found['helmsight_journal_rows_total{outcome="written"}'] == 1
    assert found['helmsight_journal_rows_total{outcome="dropped"}'] == found["helmsight_journal_waiting"] == 0
