"""Whatever is sent in the form of a response or of a message, nothing breaks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import given, settings

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.fakes import checkpoint
from tests.server.fuzz.hostile import spoilt
from tests.server.fuzz.hostile_dialects import (
    EARLIER,
    MESSAGES,
    MESSAGES_WITH_TOOLS,
    RESPONSES,
    RESPONSES_WITH_TOOLS,
)
from tests.server.fuzz.test_fuzz import COUNT, FUZZ, SECONDS, check_stream

BOUNDS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}


def application(engine: steering.Engine, folder: Path, **fields: Any) -> Flask:
    return create_app(
        Settings(slots=4, max_waiting=8, journal=str(folder / "j.db"), store="on", **fields), engine=engine
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, vectors: Path) -> Iterator[Flask]:
    """Yield the application on the real engine."""
    loaded = steering.load(checkpoint(), device="cpu")
    engine = steering.Engine(loaded, slots=4, max_length=192, max_waiting=8, threads=1)
    engine.start()
    yield application(engine, tmp_path_factory.mktemp("plain"), vectors=(str(vectors),), journal_texts=True)
    engine.stop()


@pytest.fixture(scope="module")
def tooled(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    """Yield an application whose model's template knows tools."""
    loaded = steering.load(calling(root), device="cpu")
    engine = steering.Engine(loaded, slots=4, max_length=1024, max_waiting=8, self_check=False, threads=1)
    engine.start()
    yield application(engine, tmp_path_factory.mktemp("tooled"))
    engine.stop()


@pytest.fixture(scope="module")
def earlier(plain: Flask) -> str:
    """Return the id of a response that is stored."""
    return str(plain.test_client().post("/v1/responses", json={"input": "Hi.", "max_output_tokens": 2}).json["id"])


def send(client: FlaskClient, path: str, body: dict[str, Any], earlier: str = EARLIER) -> Any:
    """Return the answer to a body, which came in time and is no failure of the server."""
    began = time.monotonic()
    data = json.dumps(body).replace(EARLIER, earlier)
    answer = client.post(path, data=data, content_type="application/json", buffered=True)
    assert time.monotonic() - began < SECONDS
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert answer.json["error"]["message"]
        assert ("type" in answer.json) == path.startswith("/v1/messages")
    elif answer.mimetype == "text/event-stream":
        assert "event: error" not in answer.text, answer.text
        assert "response.failed" not in answer.text, answer.text
    return answer


@pytest.mark.parametrize("app", ["plain", "tooled"])
@pytest.mark.parametrize("path", BOUNDS)
def test_what_is_spoilt_was_right(request: pytest.FixtureRequest, app: str, path: str, earlier: str) -> None:
    bodies = {
        ("plain", "/v1/responses"): RESPONSES, ("tooled", "/v1/responses"): RESPONSES_WITH_TOOLS,
        ("plain", "/v1/messages"): MESSAGES, ("tooled", "/v1/messages"): MESSAGES_WITH_TOOLS,
    }[app, path]  # fmt: skip
    served: Flask = request.getfixturevalue(app)
    for body in bodies:
        answer = send(served.test_client(), path, body | {BOUNDS[path]: 4}, earlier)
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            check_stream(served, answer.text, path)
        else:
            assert isinstance(answer.json["output" if path == "/v1/responses" else "content"], list)


@pytest.mark.slow
@settings(max_examples=COUNT // 4, **FUZZ)
@given(body=spoilt(RESPONSES, "max_output_tokens"))
def test_no_response_that_is_nearly_right_breaks_the_server(plain: Flask, earlier: str, body: dict[str, Any]) -> None:
    send(plain.test_client(), "/v1/responses", body, earlier)


@pytest.mark.slow
@settings(max_examples=COUNT // 8, **FUZZ)
@given(body=spoilt(RESPONSES_WITH_TOOLS, "max_output_tokens"))
def test_no_call_of_a_response_breaks_the_server(tooled: Flask, body: dict[str, Any]) -> None:
    send(tooled.test_client(), "/v1/responses", body)


@pytest.mark.slow
@settings(max_examples=COUNT // 4, **FUZZ)
@given(body=spoilt(MESSAGES))
def test_no_message_that_is_nearly_right_breaks_the_server(plain: Flask, body: dict[str, Any]) -> None:
    client = plain.test_client()
    send(client, "/v1/messages", body)
    send(client, "/v1/messages/count_tokens", {name: value for name, value in body.items() if name != "stream"})


@pytest.mark.slow
@settings(max_examples=COUNT // 8, **FUZZ)
@given(body=spoilt(MESSAGES_WITH_TOOLS))
def test_no_call_of_a_message_breaks_the_server(tooled: Flask, body: dict[str, Any]) -> None:
    client = tooled.test_client()
    send(client, "/v1/messages", body)
    send(client, "/v1/messages/count_tokens", {name: value for name, value in body.items() if name != "stream"})
