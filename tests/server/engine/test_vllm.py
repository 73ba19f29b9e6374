"""A server over vLLM answers on our wire: chats, streams, refusals that name the field, catalogue, journal, metrics."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from pydantic import SecretStr

import steering
from server.app import create_app
from server.engine import vllm
from server.engine.runtime import load
from server.settings import Settings
from steering import UnsupportedModel
from steering.vllm.servers import Server, ServerLost, Servers
from tests.ports import own_port
from tests.server.conftest import ask, data_uri
from tests.server.engine.fronts import front
from tests.server.fakes import checkpoint
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.fake import FakeVllm, facts_of
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def fake(engine: steering.Engine, vectors: Path) -> Iterator[FakeVllm]:
    """Yield a vLLM server of the embedded model, with the tests' vectors."""
    answers = PlainAnswers(checkpoint(), [vectors, checkpoint() / "vectors"], engine.mllm)
    server = FakeVllm(answers.answer, facts_of(answers, slots=8)).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def over_vllm(fake: FakeVllm, kept: Path, vectors: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    """Yield the application over the vLLM server."""
    journal = str(tmp_path_factory.mktemp("journal") / "journal.db")
    settings = Settings(
        engine=f"vllm={fake.url}", vectors=(str(vectors),), slots=4, max_waiting=8, journal=journal  # type: ignore[arg-type]
    )  # fmt: skip
    with front(settings) as app:
        yield app
    app.extensions["helmsight"].journal.close()


@pytest.fixture
def there(over_vllm: Flask) -> FlaskClient:
    return over_vllm.test_client()


def test_answers_are_those_of_our_own_engine(there: FlaskClient, client: FlaskClient) -> None:
    fields = {
        "steering": {"vector": "modality-preference", "toward": "text", "strength": 0.5},
        "diagnostics": {"include": ["focus", "modality", "decay", "confidence"]}, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    for parts, more in (
        (("What is it?",), {}),
        ((data_uri(), "What colour is it?"), fields),
        ((data_uri(), "What colour is it?"), {"contrast": {"kind": "vcd"}, "n": 2}),
        ((data_uri(), "What colour is it?"), {"baseline": True, **fields}),
        (("What is it?",), {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
            "type": "object", "properties": {"is": {"enum": ["it", "not"]}}, "required": ["is"]}}}, "max_tokens": 40}),
    ):  # fmt: skip
        found, expected = (asked(one, *parts, **more) for one in (there, client))
        for one, other in zip(found["choices"], expected["choices"], strict=True):
            assert one["message"] == other["message"]
            assert one["finish_reason"] == other["finish_reason"]
            assert one.get("applied", {}).keys() == other.get("applied", {}).keys()
            assert close(one.get("diagnostics"), other.get("diagnostics"))
            assert close(one.get("applied"), other.get("applied"))
        assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def asked(client: FlaskClient, *parts: str, **fields: Any) -> Any:
    response = ask(client, *parts, **fields)
    assert response.status_code == 200, response.text
    return response.json


def close(one: Any, other: Any, tolerance: float = 1e-4) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * max(1.0, abs(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(close(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_answers_are_streamed(there: FlaskClient, client: FlaskClient) -> None:
    streams = []
    for one in (there, client):
        response = ask(one, data_uri(), "Describe it.", stream=True, max_tokens=12)
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        streams.append(
            "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        )
    assert streams[0] == streams[1] != ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sage": {"see": True}}, "sage.see"),
        ({"contrast": {"kind": "pai"}}, "contrast.kind"),
        ({"dola": True}, "dola"),
        ({"look_at": {"bias": 1.0}}, "look_at"),
        ({"project_out": {"vector": "modality-preference"}}, "project_out"),
        ({"diagnostics": {"include": ["tam"]}}, "diagnostics.include"),
        ({"diagnostics": {"include": ["flags"]}}, "diagnostics.include"),
        ({"diagnostics": {"include": ["residual"]}}, "diagnostics.include"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_field(there: FlaskClient, fields: Any, param: str) -> None:
    response = ask(there, data_uri(), "What is it?", **fields)
    assert response.status_code == 400, response.text
    assert response.json["error"]["param"] == param
    assert response.json["error"]["code"] == "unsupported_value"


def test_cheap_diagnostics_are_those_that_it_can_do(there: FlaskClient) -> None:
    diagnostics = asked(there, data_uri(), "What is it?", diagnostics=True)["choices"][0]["diagnostics"]
    assert {"focus", "modality"} <= diagnostics.keys()
    assert "tam" not in diagnostics


def test_the_catalogue_says_what_it_can_do(there: FlaskClient, client: FlaskClient) -> None:
    (card, *presets), (own, *_) = there.get("/v1/models").json["data"], client.get("/v1/models").json["data"]
    assert (card["engine"], own["engine"]) == ("vLLM 0.0", "own")
    assert own["unsupported"] == []
    assert {"sage.see", "contrast.pai", "dola", "diagnostics.tam"} <= set(card["unsupported"])
    assert {entry["name"] for entry in card["interventions"]}.isdisjoint(card["unsupported"])
    assert {one["preset"] for one in presets} >= {"text", "vision"}
    for name in ("fingerprint", "layers", "hidden_size", "context_length", "dtype", "device", "vectors"):
        assert card[name] == own[name], name


def test_the_dialects_presets_and_guards_are_those_of_the_server(there: FlaskClient, client: FlaskClient) -> None:
    chat = {"model": "helmsight-demo", "messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 6}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "helmsight-demo", "input": "What is it?", "max_output_tokens": 16, "store": False}),
        ("/v1/chat/completions", {**chat, "model": "helmsight-demo@text"}),
        ("/v1/chat/completions", {**chat, "guard": {"when": {"mean_logprob": "< 5"}, "then": {"temperature": 0}}}),
    ]
    for path, body in bodies:
        pair = [one.post(path, json=body) for one in (there, client)]
        assert [response.status_code for response in pair] == [200, 200], [response.text for response in pair]
        one, other = (texts_of(response.json) for response in pair)
        assert one == other
        assert one


def texts_of(value: Any) -> list[str]:
    """Return the texts in a response, in order."""
    if isinstance(value, dict):
        own = [item for name, item in value.items() if name in ("text", "content") and isinstance(item, str)]
        return own + [text for item in value.values() for text in texts_of(item)]
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def test_a_deadline_ends_the_answer_on_the_server(
    over_vllm: Flask, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = over_vllm.extensions["helmsight"]
    hurried = create_app(
        app.settings.model_copy(update={"request_timeout": 2.0, "journal": SecretStr("off")}), runtime=app.runtime
    )
    monkeypatch.setattr(fake, "pause", 0.4)
    response = ask(hurried.test_client(), "Hi!", max_tokens=50, ignore_eos=True, stream=True)
    assert "request_timeout" in response.text
    assert fake.aborted.acquire(timeout=PATIENCE)


def test_a_prompt_that_the_server_reads_otherwise_is_the_messages_fault(
    there: FlaskClient, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fake.answer
    monkeypatch.setattr(fake, "answer", lambda body: answer({**body, "prompt": {**body["prompt"], "sha256": "0" * 64}}))
    response = ask(there, "Hi!")
    assert response.status_code == 400
    assert response.json["error"]["param"] == "messages"


def test_answers_are_in_the_journal_and_the_metrics(there: FlaskClient) -> None:
    def rows() -> list[Any]:
        data = there.get("/v1/diagnostics?limit=1000").json["data"]
        return [row for row in data if row["metadata"] == {"user": "of this test"}]

    asked(there, data_uri(), "What is it?", metadata={"user": "of this test"}, diagnostics={"include": ["focus"]})
    wait_for(rows)
    (row,) = rows()
    assert row["diagnostics"]["focused_image"] == 1
    assert row["finish_reason"] in ("stop", "length")
    metrics = there.get("/metrics").text
    assert "helmsight_engine_servers_ready 1.0" in metrics
    assert "helmsight_slots 4.0" in metrics
    assert there.get("/ready").status_code == 200


def test_it_is_not_ready_while_no_server_is(there: FlaskClient, over_vllm: Flask) -> None:
    client: Any = over_vllm.extensions["helmsight"].runtime.loaded.engine._client
    (server,) = client.servers
    server.lose(ServerLost("it is started again"))
    refused, readiness = ask(there, "Hi!"), there.get("/ready")
    assert (refused.status_code, readiness.status_code) == (503, 503)
    assert "gone" in refused.json["error"]["message"]
    progress = readiness.json["progress"]
    assert progress["stage"] == "waiting for vLLM 0.0"
    assert 0 <= progress["seconds"] < 20
    assert there.get("/health").status_code == 200  # who restarts what is not healthy would not bring a server back
    wait_for(lambda: there.get("/ready").status_code == 200)


def test_a_server_that_answers_wrongly_is_not_served(fake: FakeVllm, kept: Path, vectors: Path) -> None:
    def deaf(body: dict[str, Any]) -> Any:
        for vector in body.get("steering", {"vectors": []})["vectors"]:
            vector["scale"] = 0.0
        return fake.answer(body)

    wrong = FakeVllm(deaf, fake.facts).start()
    settings = Settings(engine=f"vllm={wrong.url}", vectors=(str(vectors),))
    with pytest.raises(UnsupportedModel, match="differ from the plain model's"):
        load(settings, make=vllm.load)
    wrong.stop()


def test_references_are_kept_until_a_file_changes(vectors: Path, tmp_path: Path) -> None:
    copied = tmp_path / "vectors"
    copied.mkdir()
    (copied / "a.safetensors").write_bytes(b"1")
    task = vllm.ReferenceTask(str(checkpoint()), vectors=(str(copied / "a.safetensors"),))
    name = vllm._name_of(task)
    assert vllm._name_of(task) == name
    (copied / "a.safetensors").write_bytes(b"22")
    assert vllm._name_of(task) != name


def test_it_waits_for_servers(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "PAUSE", 0.02)
    monkeypatch.setattr(vllm, "TOLD_EVERY", 0.05)
    port = own_port()
    servers = Servers([Server(f"http://127.0.0.1:{port}")])
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(vllm.wait_for(servers)))
    with caplog.at_level(logging.INFO, "helmsight"):
        waiting.start()
        wait_for(lambda: "waiting for vLLM at" in caplog.text)
    late = FakeVllm(fake.answer, fake.facts, port=port).start()
    waiting.join(PATIENCE)
    assert found[0].context_length == 2048
    late.stop()
