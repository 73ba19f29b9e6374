"""Recorded requests of clients that speak responses or messages are answered as these need it.

Each recording is replayed in its order, since chains continue answers of before. Those with tools were recorded before a
toy whose template knows them, and go to that again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.clients.test_recorded import HEADERS
from tests.server.dialects.speaking import STREAMS, events

FOLDER = Path(__file__).parent / "recorded" / "dialects"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BEYOND = {"applied", "diagnostics", "ignored", "store", "system_fingerprint"}
"""Fields of a response that the openai package's type does not have."""


@pytest.fixture(scope="module")
def clients(engine: steering.Engine, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a function from a model's name to a client of its application, which stores answers."""
    toy = steering.Engine(
        steering.load(calling(root), device="cpu"), slots=4, max_length=2048, self_check=False, threads=1
    )
    toy.start()

    @functools.cache
    def client(model: str) -> FlaskClient:
        journal = str(tmp_path_factory.mktemp("journal") / "journal.db")
        served = engine if model == "helmsight-demo" else toy
        return create_app(Settings(journal=journal, store="on"), engine=served).test_client()

    yield client
    toy.stop()


def fits_response(value: Any) -> Response:
    """Return a response, as the openai package reads it, after checking it against the package's types."""
    response = Response.model_validate(value)
    assert set(response.model_extra or {}) <= BEYOND
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return response


def fits_message(value: Any) -> None:
    """Check a message against the anthropic package's types, where that is installed, and by hand."""
    assert {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"} <= set(value)
    assert (value["type"], value["role"]) == ("message", "assistant")
    for block in value["content"]:
        assert set(block) == {"text": {"type", "text"}, "tool_use": {"type", "id", "name", "input"}}[block["type"]]
    try:
        from anthropic.types import Message
    except ImportError:
        return
    Message.model_validate(value)


def fits_event(value: Any) -> None:
    """Check an event of a message's stream against the anthropic package's types, where that is installed."""
    try:
        from anthropic.types import RawMessageStreamEvent
    except ImportError:
        return
    TypeAdapter(RawMessageStreamEvent).validate_python(value)


def check_responses(text: str | None, value: Any, body: dict[str, Any]) -> str:
    """Return the id of a response, given whole or as the text of its stream."""
    if text is not None:
        told = list(events(text))
        for event in told:
            known = EVENT.validate_python(event)
            assert set(known.model_extra or {}) <= {"name"}, (
                known
            )  # of a call, which earlier versions of the package need
        assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
        value = STREAMS["responses"](text)
    response = fits_response(value)
    assert response.model == body["model"]
    form = (body.get("text") or {}).get("format") or {}
    if response.status == "completed" and form.get("type") == "json_schema":
        assert set(json.loads(response.output_text)) == set(form["schema"]["properties"])
    if isinstance(body.get("tool_choice"), dict) or body.get("tool_choice") == "required":
        assert {item.type for item in response.output} == {"function_call"}
    return response.id


def check_messages(text: str | None, value: Any, body: dict[str, Any]) -> None:
    """Check a message, given whole or as the text of its stream."""
    if text is not None:
        told = list(events(text))
        for event in told:
            fits_event(event)
        assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]
        value = STREAMS["messages"](text)
    fits_message(value)
    assert value["model"] == body["model"]
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
        assert {block["type"] for block in value["content"]} == {"tool_use"}
        assert value["stop_reason"] in ("tool_use", "max_tokens")


CHECKS: dict[str, Callable[[str | None, Any, dict[str, Any]], Any]] = {
    "/v1/responses": check_responses,
    "/v1/messages": check_messages,
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_answered_as_its_client_needs_it(clients: Callable[[str], FlaskClient], name: str) -> None:
    client, ids = clients(RECORDED[name]["model"]), dict[str, str]()

    def renewed(text: str) -> str:
        return re.sub(r"resp_[0-9a-f]{32}", lambda found: ids[found[0]], text)

    for one in RECORDED[name]["requests"]:
        body = json.loads(renewed(json.dumps(one.get("body", {}))))
        sent = {"data": json.dumps(body)} if "body" in one else {}
        path = renewed(one["path"])
        answer = client.open(path, method=one["method"], headers=one["headers"], buffered=True, **sent)
        assert answer.status_code == one["status"], (path, answer.text[:300])
        assert answer.headers["x-request-id"]
        if one["status"] >= 400:
            error = answer.get_json()["error"]
            assert {key: error[key] for key in ("param", "code")} == one["error"]
            continue
        check = CHECKS.get(path.partition("?")[0])
        if check is None:
            assert answer.get_json()
            continue
        streams = bool(body.get("stream"))
        identity = check(*((answer.text, None) if streams else (None, answer.get_json())), body)
        if "id" in one:
            ids[one["id"]] = identity


def kinds_of(one: dict[str, Any]) -> set[str]:
    """Return the kinds of usual first steps that a request belongs to."""
    body = one.get("body", {})
    text = json.dumps(body)
    kinds = {
        "picture": "input_image" in text or '"base64"' in text,
        "stream": bool(body.get("stream")),
        "tools": "tools" in body,
        "result": "function_call_output" in text or "tool_result" in text,
        "error": one["status"] == 404,
        "chain": bool(body.get("previous_response_id")),
    }
    return {kind for kind, is_one in kinds.items() if is_one}


def test_the_recordings_have_what_users_do_first_and_no_key() -> None:
    assert {name.removesuffix("-tools") for name in RECORDED} == {
        "anthropic", "langchain", "litellm", "openai", "openai-agents", "pydantic-ai",
    }  # fmt: skip
    for name, recording in RECORDED.items():
        assert recording["client"]
        assert recording["version"]
        assert all(set(one["headers"]) <= HEADERS for one in recording["requests"])
        kinds = set().union(*(kinds_of(one) for one in recording["requests"]))
        least = {"tools"} if name.endswith("-tools") else {"picture", "stream", "tools", "error"}
        assert least <= kinds, name
    everything = [one for recording in RECORDED.values() for one in recording["requests"]]
    assert {"result", "chain"} <= set().union(*map(kinds_of, everything))
