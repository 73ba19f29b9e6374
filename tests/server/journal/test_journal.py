"""The journal's record of an answer, compared with the answer itself."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import steering
from server.app import create_app
from server.journal.entry import steered_toward
from server.journal.reading.fields import SAMPLING
from server.settings import Settings, SettingsError
from steering.protocol.intervention import REGISTRY
from tests.server.api.test_operations import samples, total
from tests.server.api.test_streams import Live, events, post_and_hold
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import NOTHING_SAID
from tests.server.journal.rows import Serve, journal_of, rows_of
from tests.waiting import wait_for

NOTHING = dict.fromkeys(kind.path[0] for kind, _ in REGISTRY.values()) | {"diagnostics": None, "baseline": False}


def test_a_plain_answer_leaves_one_row(serve: Serve, engine: steering.Engine) -> None:
    client = serve()
    before = time.time()
    answer = ask(client, data_uri(), "What is it?", seed=7, top_p=0.9, max_tokens=5).json
    (row,) = rows_of(client, 1)
    latency = row.pop("latency")
    assert row.pop("request_id").startswith("req_")
    assert before <= row.pop("created") <= time.time()
    assert row == {
        "object": "diagnostics.row",
        "id": answer["id"],
        "choice": 0,
        "model": answer["model"],
        **dict.fromkeys(("key_name", "trace_id", "span_id", "preset", "guard", "answer_correct")),
        "source": "live",
        "toward": "none",
        "vectors": [],
        "finish_reason": answer["choices"][0]["finish_reason"],
        "streamed": False,
        "interventions": [],
        "digests": [],
        "calibration": None if engine.mllm.calibration is None else engine.mllm.calibration.digest,
        "asked": NOTHING,
        "applied": None,
        "sampling": {**dict.fromkeys(SAMPLING), "temperature": 0.0, "top_p": 0.9, "max_tokens": 5, "seed": 7, "n": 1},
        "usage": {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
        "images": 1,
        "diagnostics": NOTHING_SAID,
        "metadata": None,
        "texts": None,
    }
    assert 0 < latency["first_token"] <= latency["total"] < time.time() - before
    assert client.get(f"/v1/diagnostics/{answer['id']}").json["data"][0]["id"] == answer["id"]


def test_all_numbers_that_were_set_for_sampling_are_in_the_row(serve: Serve) -> None:
    client = serve()
    ask(client, "What?", temperature=0.5, max_tokens=5, min_tokens=3, ignore_eos=True, stop="no text of the client's")
    (row,) = rows_of(client, 1)
    always = {"temperature": 0.5, "top_p": 1.0, "max_tokens": 5, "seed": None, "n": 1}
    assert row["sampling"] == dict.fromkeys(SAMPLING) | always | {"min_tokens": 3, "ignore_eos": True}


def test_a_row_says_where_a_negated_vector_really_pushes(vectors: Path) -> None:
    vector = steering.VectorStore(vectors).get("modality-preference")
    for turned, scale, way in ((vector, 1.0, "text"), (-vector, 1.0, "vision"), (-vector, -1.0, "text")):
        assert steered_toward((steering.Steer(turned, scale),)) == way
    assert steered_toward((steering.Steer(vector, 1.0), steering.Steer(-vector, 1.0))) == "other"
    assert steered_toward((steering.Steer(-vector, 0.0),)) == "none"


def test_interventions_and_readouts_are_those_of_the_answer(serve: Serve) -> None:
    client = serve()
    pictures = (data_uri(), data_uri(), "Text context: it is blue. What is it?")
    steer = {"toward": "text", "strength": 0.5}
    cases: list[dict[str, Any]] = [
        {"steering": steer, "diagnostics": {"target_image": 2}},
        {"steering": {"vectors": [{"name": "modality-preference", "scale": -1.0, "layers": [1, 2]}]}, "baseline": True},
        {"sage": True, "diagnostics": {"include": ["modality", "decay"]}},
        {"sage": {"see": True, "think": False, "generate": {"lambda": 0.25}}},
        {"contrast": {"kind": "vcd", "alpha": 0.5}, "diagnostics": True},
    ]
    answers = [ask(client, *pictures, **case).json for case in cases]
    rows = rows_of(client, len(cases))[::-1]
    for case, answer, row in zip(cases, answers, rows, strict=True):
        choice = answer["choices"][0]
        assert row["id"] == answer["id"]
        assert row["asked"] == NOTHING | case
        assert (row["applied"] or {}).keys() == {"steering", "sage", "contrast"} & case.keys()
        envelope = choice.get("diagnostics") or {}
        focus, modality = envelope.get("focus") or {}, envelope.get("modality") or {}
        assert row["diagnostics"]["attention_ratio"] == modality.get("attention_ratio")
        assert row["diagnostics"]["focused_image"] == focus.get("image")
        assert row["diagnostics"]["focus_share"] == focus.get("share")
        assert row["diagnostics"]["target_image"] == focus.get("target_image")
        assert row["diagnostics"]["correct"] == focus.get("correct")
        assert row["diagnostics"]["decay_slope"] == (envelope.get("decay") or {}).get("slope")
    assert [row["interventions"] for row in rows] == [
        ["steering"],
        ["steering"],
        ["sage.see", "sage.think", "sage.generate"],
        ["sage.see", "sage.generate"],
        ["contrast.vcd"],
    ]
    steered, composed, sage, _, contrast = (a["choices"][0]["applied"] for a in answers)
    assert rows[0]["applied"] == steered
    assert rows[0]["diagnostics"]["dose"] == steered["steering"][0]["dose"] > 0
    assert rows[0]["diagnostics"]["target_image"] == 2
    assert rows[1]["diagnostics"]["dose"] == composed["steering"][0]["dose"]
    assert rows[2]["diagnostics"]["attention_ratio"] > 0
    see, kept = sage["sage"]["see"], rows[2]["applied"]["sage"]
    assert kept["see"]["alpha"] == {
        "count": len(see["alpha"]),
        "mean": pytest.approx(sum(see["alpha"]) / len(see["alpha"])),
        "max": max(see["alpha"]),
    }
    assert kept["see"]["alpha_max"]["max"] == max(see["alpha_max"])
    assert kept["think"] == sage["sage"]["think"]
    assert kept["generate"]["masked"] == [len(patches) for patches in sage["sage"]["generate"]["masked"]]
    assert (kept["generate"]["rebuilt"], rows[3]["applied"]["sage"]["think"]) == (0, None)
    assert rows[4]["applied"] == contrast
    for query, expected in (
        ("toward=text", [0]),
        ("toward=vision", [1]),
        ("vector=modality-preference", [0, 1]),
        ("sage=think", [2]),
        ("sage=see", [2, 3]),
        ("contrast=vcd", [4]),
        ("sage=none&toward=none", [4]),
        ("intervention=sage.generate", [2, 3]),
        ("intervention=steering", [0, 1]),
        ("intervention=none", []),
    ):
        found = [row["id"] for row in client.get(f"/v1/diagnostics?{query}").json["data"]]
        assert found == [answers[i]["id"] for i in reversed(expected)], query
    summary = client.get("/v1/diagnostics/summary").json
    assert {group["intervention"] for group in summary["by_intervention"]} == {
        "steer:text", "steer:vision", "sage", "contrast:vcd",
    }  # fmt: skip


def test_each_choice_has_a_row_streamed_or_not(serve: Serve) -> None:
    client = serve()
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "diagnostics": {"include": ["focus"]}}
    whole = ask(client, data_uri(), "What is it?", **fields).json
    *chunks, _ = events(ask(client, data_uri(), "What is it?", stream=True, **fields))
    rows = rows_of(client, 4)
    for identity, streamed in ((whole["id"], False), (chunks[0]["id"], True)):
        found = client.get(f"/v1/diagnostics/{identity}").json["data"]
        assert [row["choice"] for row in found] == [0, 1]
        assert [row["streamed"] for row in found] == [streamed] * 2
        assert [row["finish_reason"] for row in found] == [c["finish_reason"] for c in whole["choices"]]
        assert sum(row["usage"]["completion_tokens"] for row in found) == whole["usage"]["completion_tokens"]
        assert [row["diagnostics"]["focused_image"] for row in found] == [1, 1]
    assert len({row["id"] for row in rows}) == 2


def test_readouts_for_the_journal_alone_are_not_the_clients(serve: Serve) -> None:
    client = serve(journal_readouts=("focus", "modality"))
    question = (data_uri(), "Text context: it is blue. What is it?")
    plain = ask(client, *question).json["choices"][0]
    some = ask(client, *question, diagnostics={"include": ["decay", "focus"], "target_image": 1}, baseline=True)
    streamed = events(ask(client, *question, stream=True, diagnostics={"include": ["decay"]}))[-2]["choices"][0]
    assert "diagnostics" not in plain
    choice = some.json["choices"][0]
    assert "modality" not in choice["diagnostics"]
    assert "modality" not in choice["baseline"]["diagnostics"]
    assert {"focus", "decay"} <= choice["diagnostics"].keys()
    assert not {"modality", "focus"} & streamed["diagnostics"].keys()
    for row in rows_of(client, 3):
        assert row["diagnostics"]["attention_ratio"] > 0
        assert row["diagnostics"]["focused_image"] == 1
    assert total(samples(client), "helmsight_attention_ratio_count") == 3
    assert samples(client)['helmsight_diagnostics_total{readout="decay"}'] == 2
    assert 'helmsight_diagnostics_total{readout="modality"}' not in samples(client)


def test_readouts_for_the_journal_have_numbers() -> None:
    with pytest.raises(
        SettingsError,
        match="numbers: 'tam' is unknown; must be one of focus, modality, decay, residual, flags, confidence, alarm",
    ):
        create_app(Settings(journal="off", journal_readouts=("focus", "tam")), engine=FakeEngine())  # type: ignore[arg-type]


def test_readouts_for_the_journal_refuse_no_request(serve: Serve) -> None:
    client = serve(journal_readouts=("focus", "modality", "decay", "residual", "flags"))
    for fields in ({}, {"sage": {"generate": False}}, {"contrast": {"kind": "icd"}}, {"n": 2}, {"baseline": True}):
        answer = ask(client, data_uri(), "What is it?", **fields)
        assert answer.status_code == 200, answer.text
        assert "diagnostics" not in answer.json["choices"][0]
    assert ask(client, "Hello.").status_code == 200
    rows = rows_of(client, 7)
    assert rows[0]["diagnostics"]["focused_image"] is None
    assert rows[0]["diagnostics"]["kl"] > 0
    for row in rows[1:]:
        known = {name for name, value in row["diagnostics"].items() if value is not None}
        assert known >= {"focused_image", "focus_share", "decay_slope", "kl", "dissociation"}


def test_refused_requests_leave_no_row(serve: Serve) -> None:
    client = serve()
    assert ask(client, n=0).status_code == 400
    assert ask(client, steering={"vector": "nobody"}).status_code == 400
    assert ask(client, model="nobody").status_code == 404
    ask(client, max_tokens=1)
    assert len(rows_of(client, 1)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_given_up_say_so(fake: FakeEngine, serve: Serve, live: Live, stream: bool) -> None:
    fake.script = ("Hel", threading.Event())
    late = serve(fake, request_timeout=1.5, journal_texts=True)
    ask(late, stream=stream, n=2)
    rows = rows_of(late, 2)
    assert [(row["choice"], row["finish_reason"]) for row in rows] == [(1, "cancelled"), (0, "cancelled")]
    assert [row["texts"]["answer"] for row in rows] == ["", "Hel"]
    assert [row["usage"]["completion_tokens"] for row in rows] == [0, 1]
    gone = serve(fake)
    connection = post_and_hold(live(gone.application), stream)
    wait_for(lambda: len(fake.completions) == 2)
    connection.close()
    (row,) = rows_of(gone, 1)
    assert (row["finish_reason"], row["applied"], row["texts"]) == ("cancelled", None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_after_the_start_says_so(fake: FakeEngine, serve: Serve, stream: bool) -> None:
    fake.script = ("Hel", steering.Fault("logits were not finite"))
    client = serve(fake)
    ask(client, stream=stream)
    (row,) = rows_of(client, 1)
    assert (row["finish_reason"], row["usage"]["completion_tokens"]) == ("error", 1)
    assert row["diagnostics"] == NOTHING_SAID


def test_answers_that_the_servers_end_cuts_off_say_so(fake: FakeEngine, serve: Serve) -> None:
    fake.script = ("Hel", threading.Event())
    client = serve(fake)
    thread = threading.Thread(target=lambda: ask(client))
    thread.start()
    wait_for(lambda: bool(fake.completions))
    client.application.extensions["helmsight"].runtime.drain(0.0)
    fake.completions[0].cancel()
    thread.join()
    assert rows_of(client, 1)[0]["finish_reason"] == "shutdown"
    assert len(client.get("/v1/diagnostics?finish_reason=shutdown").json["data"]) == 1


def test_answers_that_the_engines_death_cuts_off_are_errors(fake: FakeEngine, serve: Serve) -> None:
    fake.script = ("Hel", threading.Event(), steering.Fault("The engine died."))
    client = serve(fake)
    thread = threading.Thread(target=lambda: ask(client))
    thread.start()
    wait_for(lambda: bool(fake.completions))
    fake.healthy = False
    fake.script[1].set()
    thread.join()
    assert rows_of(client, 1)[0]["finish_reason"] == "error"


def test_a_stream_that_nobody_reads_is_cancelled(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    client.post("/v1/chat/completions", json={"messages": [user("hi")], "stream": True}, buffered=False).close()
    assert rows_of(client, 1)[0]["finish_reason"] == "cancelled"


def test_what_the_template_is_told_is_kept_without_its_texts(fake: FakeEngine, serve: Serve) -> None:
    fake.capabilities = replace(fake.capabilities, template_variables=frozenset({"title", "enable_thinking"}))
    told = {"title": "a private title", "enable_thinking": False}
    messages = [user("What?"), {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "chat_template_kwargs": told, "continue_final_message": True}
    for settings, title in (({}, "(15 characters)"), ({"journal_texts": True}, "a private title")):
        client = serve(fake, **settings)
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        (row,) = rows_of(client, 1)
        assert row["asked"]["chat_template_kwargs"] == told | {"title": title}
        assert row["asked"]["continue_final_message"] is True
        ask(client, "What?")
        plain, _ = rows_of(client, 2)
        assert not plain["asked"].keys() & {"chat_template_kwargs", "continue_final_message"}


def test_texts_are_kept_only_when_switched_on_and_bounded(fake: FakeEngine, serve: Serve, tmp_path: Path) -> None:
    secret = "a very private question\0"
    fake.script = ("a very private answer " * 10,)
    client = serve(fake)
    told = {"text": "a private way out", "place": "system"}
    ask(client, secret, contrast={"kind": "icd", "instruction": "a very private instruction"}, refusal_prompt=told)
    (row,) = rows_of(client, 1)
    assert row["texts"] is None
    assert row["asked"]["refusal_prompt"] == told | {"text": "(17 characters)"}
    assert row["asked"]["contrast"] == {"kind": "icd", "instruction": "(26 characters)"}
    journal_of(client).close()
    assert all(b"private" not in file.read_bytes() for file in tmp_path.glob("journal0.db*"))

    client = serve(fake, journal_texts=True, journal_text_limit=60)
    image = data_uri()
    body = {"messages": [{"role": "system", "content": "Be brief. " * 10}, user(image, "What is\0 it?", "Say.")]}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    (row,) = rows_of(client, 1)
    assert row["texts"]["answer"] == ("a very private answer " * 10)[:59] + "…"
    assert row["texts"]["prompt"].startswith("…")
    assert row["texts"]["prompt"].endswith("\nuser: What is\ufffd it?\nSay.")
    assert len(row["texts"]["prompt"]) == 60
    assert image[30:90] not in json.dumps(row)


def test_metadata_is_kept_and_judges_answers(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    for right, focused in (("true", False), ("true", True), ("false", False), (None, False)):
        fake.diagnostics = {"focus": {"image": 1, "share": 0.5, "target_image": 2, "correct": focused}}
        ask(client, metadata={"user": "ünï\0"} | ({} if right is None else {"answer_correct": right}))
    assert ask(client, metadata={"answer_correct": "maybe"}).status_code == 400
    rows = rows_of(client, 4)
    assert [row["answer_correct"] for row in rows] == [None, False, True, True]
    assert rows[0]["metadata"] == {"user": "ünï\ufffd"}
    summary = client.get("/v1/diagnostics/summary").json
    assert summary["ivm"] == {"known": 2, "implicit": 1, "rate": 0.5}
    assert summary["focus"] == {"known": 4, "correct": 1, "accuracy": 0.25}


@pytest.mark.parametrize(
    "metadata",
    [[], "x", {"k": 1}, {"k": None}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "" for i in range(17)}, {"k": {}}],
)
def test_metadata_out_of_openais_bounds_is_refused(fake: FakeEngine, serve: Serve, metadata: Any) -> None:
    response = ask(serve(fake, journal="off"), metadata=metadata)
    assert (response.status_code, response.json["error"]["param"]) == (400, "metadata")
    assert len(response.text) < 400


def test_metadata_within_openais_bounds_is_taken(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    metadata = {str(i) * 32: "é" * 512 for i in range(10, 26)}
    assert ask(client, metadata=metadata).status_code == 200
    assert ask(client, metadata=None).status_code == 200
    assert [row["metadata"] for row in rows_of(client, 2)] == [None, metadata]
