"""Requests recorded from real clients get the answers that these need.

`asking/` has the clients' scripts, and `record.py` records them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from jsonschema import Draft202012Validator
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.openapi.checker import Checker

RECORDED = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "recorded").glob("*.json"))
}
REQUESTS = [
    pytest.param(one, id=f"{name}-{index}")
    for name, client in RECORDED.items()
    for index, one in enumerate(client["requests"])
]
NEVER = {
    "inspect": {"stream"},
    "lm-eval": {"picture", "stream", "schema", "tools"},
    "lmms-eval": {"stream", "schema", "tools"},
}
"""Features that a client has no way to ask for."""
HEADERS = {"user-agent", "content-type", "accept", "transfer-encoding"}


@pytest.fixture(scope="module")
def checker(app: Flask) -> Checker:
    """Return a checker that holds each answer to its schema in the served document."""
    return Checker(app.test_client())


def replay(checker: Checker, one: dict[str, Any], **fields: Any) -> Any:
    """Return the answer to a recorded request, with some fields of its body replaced."""
    body = {"data": json.dumps({**one["body"], **fields})} if "body" in one else {}
    method, path = one["method"].lower(), one["path"]
    if path in checker.document["paths"]:
        return checker.send(method, path, headers=one["headers"], **body)
    answer = checker.client.open(path, method=method, headers=one["headers"], **body)
    checker.valid(answer.json, {"$ref": "#/components/schemas/ErrorBody"})
    return answer


def formed(text: str, form: dict[str, Any]) -> None:
    """Assert that a text that ended by itself is of the format that was asked for."""
    value = json.loads(text)
    if form["type"] == "json_schema":
        Draft202012Validator(form["json_schema"]["schema"]).validate(value)
    else:
        assert isinstance(value, dict)


def whole(answer: Any, body: dict[str, Any]) -> ChatCompletion:
    """Return a non-streamed answer, as the openai package reads it."""
    completion = ChatCompletion.model_validate(answer.json)
    assert completion.model == body["model"]
    assert "ignored" not in answer.json
    assert [choice.index for choice in completion.choices] == list(range(body.get("n") or 1))
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    for choice in completion.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content is not None or choice.message.tool_calls
        assert (choice.logprobs is not None) == bool(body.get("logprobs"))
        if choice.finish_reason == "stop" and body.get("response_format"):
            formed(choice.message.content, body["response_format"])
    return completion


def streamed(answer: Any, body: dict[str, Any]) -> list[ChatCompletionChunk]:
    """Return the chunks of a stream, after checking its end and the fields that all chunks share."""
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")) for event in events]
    assert {(chunk.id, chunk.model) for chunk in chunks} == {(chunks[0].id, body["model"])}
    said = [chunk for chunk in chunks if chunk.choices]
    assert said[0].choices[0].delta.role == "assistant"
    assert [bool(chunk.choices[0].finish_reason) for chunk in said] == [False] * (len(said) - 1) + [True]
    counted = [index for index, chunk in enumerate(chunks) if chunk.usage]
    assert counted == ([len(said)] if (body.get("stream_options") or {}).get("include_usage") else [])
    return chunks


@pytest.mark.parametrize("one", REQUESTS)
def test_a_request_is_answered_as_its_client_needs_it(checker: Checker, one: dict[str, Any]) -> None:
    answer, body = replay(checker, one), one.get("body", {})
    assert answer.status_code == one["status"]
    assert answer.headers["x-request-id"]
    if answer.status_code >= 400:
        assert {name: answer.json["error"][name] for name in ("param", "code")} == one["error"]
        assert answer.json["error"]["message"]
    elif one["method"] == "GET":
        models = [Model.model_validate(model) for model in answer.json["data"]]
        assert models[0].id == "helmsight-demo"
    elif body.get("stream"):
        assert answer.mimetype == "text/event-stream"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed(answer, body) if chunk.choices)
        again = whole(replay(checker, one, stream=False, stream_options=None), body)
        assert text
        assert text == again.choices[0].message.content or body.get("temperature")
    else:
        preset = body["model"].partition("@")[2]
        for choice in whole(answer, body).choices:
            assert ((choice.model_extra or {}).get("applied") or {}).get("preset", "") == preset


def done(one: dict[str, Any]) -> set[str]:
    """Return the kinds of usual first steps that a request belongs to."""
    body = one.get("body", {})
    found = {
        "picture": "image_url" in json.dumps(body),
        "stream": bool(body.get("stream")),
        "schema": (body.get("response_format") or {}).get("type") == "json_schema",
        "tools": "tools" in body,
        "error": one["status"] == 404,
    }
    return {kind for kind, is_one in found.items() if is_one}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_names_its_client_and_no_key_and_has_what_users_do_first(name: str) -> None:
    client = RECORDED[name]
    assert client["client"]
    assert client["version"]
    assert all(set(one["headers"]) <= HEADERS for one in client["requests"])
    kinds = set().union(*(done(one) for one in client["requests"]))
    assert kinds == {"picture", "stream", "schema", "tools", "error"} - NEVER.get(name, set())
