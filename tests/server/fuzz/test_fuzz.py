"""Whatever is sent, nothing breaks: requests made from the served OpenAPI document, and valid ones that were spoilt.

A part of it in every run; `HELMSIGHT_FUZZ=10000 pytest tests/server/fuzz` makes about as many requests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.fakes import checkpoint
from tests.server.fuzz.hostile import CHATS, spoilt
from tests.server.openapi.checker import events_of

COUNT = int(os.environ.get("HELMSIGHT_FUZZ", "400"))
SECONDS = 120.0
"""An answer that takes longer hangs."""
FUZZ: dict[str, Any] = {
    "deadline": None, "derandomize": "HELMSIGHT_FUZZ" not in os.environ, "database": None,
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, vectors: Path) -> Iterator[Flask]:
    """Yield the application on the real engine, with a journal and a limit that keeps answers short."""
    engine = steering.Engine(
        steering.load(checkpoint(), device="cpu"), slots=4, max_length=192, max_waiting=8, threads=1
    )
    engine.start()
    journal = tmp_path_factory.mktemp("journal") / "journal.db"
    yield create_app(
        Settings(vectors=(str(vectors),), slots=4, max_waiting=8, journal=str(journal), journal_texts=True),
        engine=engine,  # type: ignore[arg-type]
    )
    engine.stop()


@pytest.mark.slow
def test_no_request_that_the_document_tells_of_breaks_the_server(fuzzed: Flask) -> None:
    document = schemathesis.openapi.from_wsgi("/openapi.json", fuzzed)
    operations = [found.ok() for found in document.get_all_operations()]
    for operation in operations:

        @settings(max_examples=max(2, COUNT // 2 // len(operations)), **FUZZ)
        @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
        def asked(case: Any) -> None:
            began = time.monotonic()
            response = case.call()
            assert time.monotonic() - began < SECONDS
            checks = [not_a_server_error, status_code_conformance]
            if "event-stream" in str(response.headers.get("content-type")):  # schemathesis refuses some now and then
                check_stream(fuzzed, response.content.decode(), case.operation.path)
            else:
                checks.append(response_schema_conformance)
            case.validate_response(response, checks=checks)

        asked()


def check_stream(app: Flask, text: str, path: str = "/v1/chat/completions") -> None:
    """Compare each event of a stream with the document."""
    document: Any = app.test_client().get("/openapi.json").json
    responses = document["paths"][path]["post"]["responses"]
    schema = responses["200"]["content"]["text/event-stream"]["schema"]
    event = Draft202012Validator({**schema, "components": document["components"]})
    values = events_of(text, path)
    assert values
    for value in values:
        event.validate(value)


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_what_is_spoilt_was_right(fuzzed: Flask, number: int) -> None:
    answer = fuzzed.test_client().post("/v1/chat/completions", json=CHATS[number] | {"max_tokens": 4})
    assert answer.status_code == 200, answer.text
    streamed = CHATS[number] | {"max_tokens": 4, "n": 1, "stream": True}
    answer = fuzzed.test_client().post("/v1/chat/completions", json=streamed)
    if answer.status_code == 200:  # some are for whole answers alone
        check_stream(fuzzed, answer.text)


@pytest.mark.slow
@settings(max_examples=COUNT // 2, **FUZZ)
@given(body=spoilt(CHATS))
def test_no_chat_that_is_nearly_right_breaks_the_server(fuzzed: Flask, body: dict[str, Any]) -> None:
    began = time.monotonic()
    # What Python writes is more than JSON has, as of clients: lone surrogates, NaN
    answer = fuzzed.test_client().post("/v1/chat/completions", data=json.dumps(body), content_type="application/json")
    text = answer.get_data(as_text=True)
    assert time.monotonic() - began < SECONDS
    assert answer.status_code < 500, text
    if answer.status_code != 200:
        assert answer.get_json()["error"]["message"]
    elif not body.get("stream"):
        assert json.loads(text)["choices"]
    else:
        assert '"server_error"' not in text, text
