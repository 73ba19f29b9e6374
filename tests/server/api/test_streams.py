"""Server-sent events, clients that leave, and answers that take too long."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.dialects.answer import Answer
from server.settings import Settings
from steering import Chunk, TokenLogprob
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE, wait_for

Live = Callable[[Flask], str]


def events(response: Any) -> list[Any]:
    """Return the payloads of a stream; the last one is "[DONE]" when the stream ended well."""
    assert response.mimetype == "text/event-stream"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def test_the_events_are_openais(client: FlaskClient) -> None:
    whole = ask(client, data_uri(), "Describe the picture.").json
    *chunks, done = events(ask(client, data_uri(), "Describe the picture.", stream=True))
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert chunk["object"] == "chat.completion.chunk"
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(d["delta"].get("content", "") for d in deltas) == whole["choices"][0]["message"]["content"]
    assert [d["finish_reason"] for d in deltas] == [None] * (len(deltas) - 1) + [whole["choices"][0]["finish_reason"]]
    assert deltas[-1]["delta"] == {}


def test_an_event_of_text_alone_is_written_as_all_events_are() -> None:
    answer = Answer('a "model"', "fp_1")
    said = Chunk(1, 'He said: "\\ü"\n\u2028', (TokenLogprob(3, "a", (97,), -0.5, ()),))
    for usage_asked in (False, True):
        assert answer.events(said, usage_asked) == answer._event(1, {"content": said.text}, None, usage_asked)
    assert answer.events(replace(said, text=""), False) == answer._event(1, {"content": ""}, None, False)
    assert answer.events(Chunk(1, "", ()), False) == ""


def test_usage_comes_last_when_asked_for(client: FlaskClient) -> None:
    whole = ask(client, data_uri(), "Describe the picture.").json
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(ask(client, data_uri(), "Describe the picture.", **fields))
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_the_extras_come_with_the_last_chunk_of_each_choice(client: FlaskClient) -> None:
    extras = {"steering": {"toward": "text"}, "diagnostics": True, "baseline": True}
    whole = ask(client, data_uri(), "Describe the picture.", **extras).json["choices"][0]
    fields = {"stream": True, "n": 2, "logprobs": True, **extras}
    chunks = [c["choices"][0] for c in events(ask(client, data_uri(), "Describe the picture.", **fields))[:-1]]
    for index in (0, 1):
        *others, last = [chunk for chunk in chunks if chunk["index"] == index]
        assert last["applied"] == whole["applied"]
        assert last["diagnostics"].keys() == whole["diagnostics"].keys()
        assert last["baseline"]["message"] == whole["baseline"]["message"]
        assert not any(key in chunk for chunk in others for key in ("applied", "diagnostics", "baseline"))
        tokens = [token["token"] for chunk in others if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
        assert "".join(tokens) == whole["message"]["content"]


def test_errors_before_the_start_have_a_status(client: FlaskClient) -> None:
    assert ask(client, stream=True, n=0).status_code == 400


def test_an_error_after_the_start_is_an_event(fake: FakeEngine) -> None:
    fake.script = ("Hel", steering.Fault("logits were not finite"))
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    *_, text, last = events(ask(client, stream=True))
    assert text["choices"][0]["delta"] == {"content": "Hel"}
    assert last["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_while_nothing_is_written(fake: FakeEngine, live: Live, stream: bool) -> None:
    fake.script = (threading.Event(),)  # waits in the queue for ever
    connection = post_and_hold(live(create_app(Settings(), engine=fake)), stream)  # type: ignore[arg-type]
    wait_for(lambda: bool(fake.completions))
    assert not fake.completions[0].cancelled.wait(0.6), "a client that waits must be left alone"
    connection.close()
    assert fake.completions[0].cancelled.wait(PATIENCE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(engine: steering.Engine, app: Flask, live: Live, stream: bool) -> None:
    endless = {"logit_bias": dict.fromkeys(map(str, engine.mllm.stop_ids), -100), "max_tokens": 1800, "n": 4}
    before, left = engine.stats()["cancelled"], gone(app)
    connection = post_and_hold(live(app), stream, **endless)
    wait_for(lambda: engine.stats()["running"] == 4)
    connection.close()
    wait_for(lambda: engine.stats()["running"] == 0)
    assert engine.stats()["cancelled"] == before + 4
    wait_for(lambda: gone(app) == left + 1)


def test_a_stream_that_finds_its_client_gone_is_counted(fake: FakeEngine) -> None:
    fake.script = ("one", "two")
    app = create_app(Settings(), engine=fake)  # type: ignore[arg-type]
    body = {"messages": [user("hi")], "stream": True}
    response = app.test_client().post("/v1/chat/completions", json=body, buffered=False)
    next(response.iter_encoded())
    response.close()  # as where a write fails
    assert gone(app) == 1


def gone(app: Flask) -> float:
    """Return the number of requests that were counted as abandoned by their client."""
    return app.extensions["helmsight"].metrics.disconnects.labels("gone")._value.get()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_given_up(fake: FakeEngine, stream: bool) -> None:
    fake.script = (threading.Event(),)
    client = create_app(Settings(request_timeout=1.5), engine=fake).test_client()  # type: ignore[arg-type]
    response = ask(client, stream=stream)
    error = events(response)[-1]["error"] if stream else response.json["error"]
    assert response.status_code == (200 if stream else 504)
    assert error["code"] == "request_timeout"
    assert fake.completions[0].cancelled.is_set()


@pytest.fixture
def measuring(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Return an engine whose measurement for "auto" does not end by itself."""
    fake.script = (threading.Event(),)

    def decide(asked: Any, begun: Callable[[Any], object]) -> NoReturn:
        completion = fake.submit(asked)
        begun(completion)
        list(completion)
        raise steering.Fault("The request was cancelled.")

    monkeypatch.setattr(fake, "decide", decide)
    return fake


@pytest.fixture
def fitting(fake: FakeEngine, tmp_path: Path) -> Settings:
    """Return settings with a vector for the engine."""
    capabilities = fake.capabilities
    ones = torch.ones(capabilities.layers)
    direction = torch.ones(capabilities.layers, capabilities.hidden_size)
    vector = steering.SteeringVector("modality-preference", direction, ones, ones, ones, (1,), capabilities.fingerprint)
    vector.save(tmp_path / "modality-preference.safetensors")
    return Settings(vectors=(str(tmp_path),), slots=4, max_waiting=8)


AUTO = {"steering": {"toward": "auto"}}


def test_what_is_measured_ends_when_its_client_leaves(measuring: FakeEngine, fitting: Settings, live: Live) -> None:
    app = create_app(fitting, engine=measuring)  # type: ignore[arg-type]
    connection = post_and_hold(live(app), stream=False, **AUTO)
    wait_for(lambda: len(measuring.completions) == 1)
    assert not measuring.completions[0].cancelled.is_set()
    connection.close()
    wait_for(measuring.completions[0].cancelled.is_set)
    wait_for(lambda: 'helmsight_disconnects_total{reason="gone"} 1.0' in app.test_client().get("/metrics").text)


def test_what_takes_too_long_to_measure_is_given_up(measuring: FakeEngine, fitting: Settings) -> None:
    settings = fitting.model_copy(update={"request_timeout": 1.5})
    response = ask(create_app(settings, engine=measuring).test_client(), **AUTO)  # type: ignore[arg-type]
    assert (response.status_code, response.json["error"]["code"]) == (504, "request_timeout")
    assert measuring.completions[0].cancelled.is_set()
    assert len(measuring.completions) == 1


def test_a_stream_that_nobody_reads_is_cancelled(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    body = {"messages": [user("hi")], "stream": True}
    client.post("/v1/chat/completions", json=body, buffered=False).close()
    assert fake.completions[0].cancelled.is_set()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def head(length: int, **more: str) -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in more.items()),
    )
    return "\r\n".join((*lines, "", "")).encode()


def post_and_hold(url: str, stream: bool, shown: dict[str, str] | None = None, **fields: Any) -> socket.socket:
    """Send a request, `shown` among its headers, and return the open connection without reading the answer."""
    body = json.dumps({"messages": [user("hi")], "stream": stream, **fields}).encode()
    connection = connect(url)
    connection.sendall(head(len(body), **(shown or {})) + body)
    return connection
