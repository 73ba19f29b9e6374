"""Bodies of other dialects that mean no chat: errors name the body's own fields, in each dialect's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from server.access.named import NamedKey, digest_of, write
from server.app import create_app
from server.dialects.dialect import renamed
from server.errors import to_api_error
from server.settings import Settings
from steering import ContextOverflow, OutOfRoom, RequestError
from tests.server.conftest import data_uri
from tests.server.dialects.speaking import events
from tests.server.fakes import FakeEngine

BROKEN = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}

FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return create_app(Settings(), engine=FakeEngine()).test_client()


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": "a", "background": True}, "background", "unsupported_value"),
        ({"input": "a", "conversation": "c"}, "conversation", "unsupported_value"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        ({"input": "a", "messages": []}, "messages", "unknown_parameter"),
        ({"input": "a", "max_tokens": 4}, "max_tokens", "unknown_parameter"),
        ({"input": "a", "n": 2}, "n", "unknown_parameter"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "a", "max_output_tokens": "x"}, "max_output_tokens", "invalid_value"),
        ({"input": "a", "temperature": 9}, "temperature", "invalid_value"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include[0]", "unsupported_value"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_value"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": "a", "truncation": "some"}, "truncation", "invalid_value"),
        ({"input": "a", "steerin": True}, "steerin", "unknown_parameter"),
        ({"input": "a", "sage": "x"}, "sage", "invalid_value"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"role": "owner", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": ["a"]}, "input[0]", "invalid_value"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_value"),
        (part(type="input_file", file_id="f"), "input[0].content[0].type", "unsupported_value"),
        (part(type="input_image", file_id="f"), "input[0].content[0].image_url", "missing_required_parameter"),
        (part(type="input_image", image_url=BROKEN), "input[0].content[0].image_url", "invalid_image"),
        (part(type="input_text"), "input[0].content[0].text", "missing_required_parameter"),
        ({"instructions": 5, "input": "a"}, "instructions", "invalid_value"),
        ({"input": "a", "stream_options": 5}, "stream_options", "invalid_value"),
        (
            {"input": "a", "stream_options": {"include_obfuscation": "x"}},
            "stream_options.include_obfuscation",
            "invalid_value",
        ),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content[0].text", "invalid_value"),
        (
            {"input": "a", "strict": True, "store": True, "reasoning": {"effort": "low"}},
            "reasoning",
            "unknown_parameter",
        ),
    ],
)
def test_a_response_that_is_refused(client: FlaskClient, body: dict[str, Any], param: str, code: str) -> None:
    response = client.post("/v1/responses", json=body)
    error = response.json["error"]
    assert (400 <= response.status_code < 500, error["param"], error["code"]) == (True, param, code), error
    assert f"'{param}" in error["message"] or param in ("previous_response_id",), error["message"]


def message(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 4, **fields}


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"max_tokens": 4}, "messages", 400),
        ({"messages": [{"role": "user", "content": "a"}]}, "max_tokens", 400),
        (message({"type": "text", "text": "a"}, max_tokens=0), "max_tokens", 400),
        (message({"type": "text"}), "messages[0].content[0].text", 400),
        (message({"type": "document"}), "messages[0].content[0].type", 400),
        (message({"type": "image", "source": SOURCE}), "messages[0].content[0].source", 400),
        (message({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type", 400),
        (message({"type": "tool_use", "id": "1", "name": "a", "input": {}}), "messages[0].content[0].type", 400),
        (message(), "messages[0].content", 400),
        ({"messages": [{"role": "system", "content": "a"}], "max_tokens": 4}, "messages[0].role", 400),
        (message({"type": "text", "text": "a"}, system=5), "system", 400),
        (message({"type": "text", "text": "a"}, stop=["a"]), "stop", 400),
        (message({"type": "text", "text": "a"}, mcp_servers=[{}]), "mcp_servers", 400),
        (message({"type": "text", "text": "a"}, tools=[{"type": "bash_20250124", "name": "a"}]), "tools[0].type", 400),
        (message({"type": "text", "text": "a"}, tools=[{"name": "a"}]), "tools[0].input_schema", 400),
        (message({"type": "text", "text": "a"}, tool_choice={"type": "some"}), "tool_choice.type", 400),
        (message({"type": "text", "text": "a"}, stop_sequences=[1]), "stop_sequences[0]", 400),
        (message({"type": "text", "text": "a"}, model="other"), "model", 404),
        (message({"type": "text", "text": "a"}, cache_control=5), "cache_control", 400),
        (message({"type": "text", "text": "a"}, cache_control={"type": "some"}), "cache_control.type", 400),
        (
            message({"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1y"}}),
            "messages[0].content[0].cache_control.ttl",
            400,
        ),
        (message({"type": "text", "text": "a"}, thinking=5), "thinking", 400),
        (message({"type": "text", "text": "a"}, thinking={"type": "some"}), "thinking.type", 400),
        (message({"type": "text", "text": "a"}, thinking={"type": "enabled"}), "thinking.budget_tokens", 400),
        (message({"type": "text", "text": "a"}, metadata={"answer_correct": "yes"}), "metadata", 400),
        (message({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type", 400),
        (
            message({"type": "text", "text": "a", "mood": "good"}, system="b", strict=True),
            "messages[0].content[0].mood",
            400,
        ),
    ],
)
def test_a_message_that_is_refused(client: FlaskClient, body: dict[str, Any], param: str, status: int) -> None:
    response = client.post("/v1/messages", json=body)
    value = response.json
    assert (response.status_code, value["type"], value["error"]["param"]) == (status, "error", param), value
    assert value["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert value["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_keys_come_in_either_header() -> None:
    client = create_app(Settings(api_keys=("k" * 8,)), engine=FakeEngine()).test_client()
    body = message({"type": "text", "text": "a"})
    refused = client.post("/v1/messages", json=body)
    assert (refused.status_code, refused.json["error"]["type"]) == (401, "authentication_error")
    assert "'x-api-key: KEY' or 'Authorization: Bearer KEY'" in refused.json["error"]["message"]
    assert "x-api-key" not in client.post("/v1/responses", json={"input": "a"}).json["error"]["message"]
    for headers in ({"x-api-key": "k" * 8}, {"Authorization": "Bearer " + "k" * 8}):
        assert client.post("/v1/messages", json=body, headers=headers).status_code == 200
    assert client.post("/v1/messages", json=body, headers={"x-api-key": "other"}).status_code == 401


def test_errors_before_the_dialect_have_its_form(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = NamedKey(name="ann", digest=digest_of("k" * 16), roles=("use",), rate="1/hour")
    write(keys, [key])
    client = create_app(Settings(named_key_file=str(keys), max_body=2000), engine=FakeEngine()).test_client()
    headers = {"x-api-key": "k" * 16}
    body = message({"type": "text", "text": "a"})
    assert client.post("/v1/messages", json=body, headers=headers).status_code == 200
    for told, status, kind in (
        (client.post("/v1/messages", json=body, headers=headers), 429, "rate_limit_error"),
        (client.get("/v1/messages", headers=headers), 405, "invalid_request_error"),
        (client.get("/v1/messages/batches", headers=headers), 404, "not_found_error"),
        (client.post("/v1/v1/messages", json=body, headers=headers), 404, "not_found_error"),
        (client.post("/v1/messages/count_tokens", data=b"a" * 3000, headers=headers), 415, "invalid_request_error"),
        (client.post("/v1/messages/count_tokens", json={"a": "b" * 3000}, headers=headers), 413, "request_too_large"),
    ):
        assert (told.status_code, told.json["type"], told.json["error"]["type"]) == (status, "error", kind)
        assert told.json["request_id"] == told.headers["request-id"] == told.headers["x-request-id"]
    elsewhere = client.get("/v1/responses/batches/x", headers=headers)
    assert (elsewhere.status_code, [*elsewhere.json]) == (404, ["error"])
    assert "request-id" not in elsewhere.headers


def test_a_message_names_each_place_of_the_body() -> None:
    problem = RequestError("'response_format.json_schema.schema' and 'tools[0].function' exclude one another; 'n'.")
    meant = {"response_format.json_schema": "text.format", "tools[0].function": "tools[0]", "messages": "input"}
    renewed = renamed(to_api_error(problem), meant)
    assert (renewed.message, renewed.param) == ("'text.format.schema' and 'tools[0]' exclude one another; 'n'.", None)


def test_a_request_whose_room_others_use_may_come_again_later() -> None:
    fake = FakeEngine()
    fake.refusal = OutOfRoom("'messages' are too many now.", param="messages", code="grammars_in_use", retry_after=1.2)
    told = create_app(Settings(), engine=fake).test_client().post("/v1/responses", json={"input": "a"})
    assert (told.status_code, told.headers["Retry-After"]) == (429, "2")
    assert told.json["error"] == {
        "message": "'input' are too many now.", "type": "rate_limit_error", "param": "input", "code": "grammars_in_use",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_error_behind_the_first_token_names_the_body_s_own_fields(stream: bool) -> None:
    place = "response_format.json_schema.schema"
    error = RequestError(f"'tools' or '{place}' became too complex.", param=place)
    engine, text = FakeEngine("It", error), {"type": "text", "text": "a"}
    engine.can(grammars=True)
    client = create_app(Settings(), engine=engine).test_client()
    for path, body, own in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, place),
        ("/v1/messages", message(text, output_config={}), place),
        ("/v1/messages", message(text, output_config={"format": FORM}), "output_config.format.schema"),
        ("/v1/responses", {"input": "a", "text": {"format": {**FORM, "name": "a"}}}, "text.format.schema"),
    ):
        response = client.post(path, json={**body, "stream": stream}, buffered=True)
        assert f"'tools' or '{own}' became too complex." in response.text
        if not stream:
            assert (response.status_code, response.json["error"]["param"]) == (400, own)


def test_what_anthropic_s_diagnostics_ask_of_its_cache_is_ignored(client: FlaskClient) -> None:
    body = message({"type": "text", "text": "a"}, diagnostics={"previous_message_id": None})
    answer = client.post("/v1/messages", json=body).json
    assert answer["ignored"] == ["diagnostics.previous_message_id"]
    assert "diagnostics" not in answer
    body["diagnostics"]["include"] = ["focus"]
    both = client.post("/v1/messages", json=body).json
    assert both["ignored"] == ["diagnostics.previous_message_id"]
    assert "diagnostics" in both


def test_a_field_of_chats_that_messages_lack_is_not_refused_for_several_answers(client: FlaskClient) -> None:
    for name, meant in (("n", "; a request has one answer."), ("store", " here."), ("logprobs", " here.")):
        error = client.post("/v1/messages", json=message({"type": "text", "text": "a"}, **{name: 1})).json["error"]
        assert (error["message"], error["param"]) == (f"'{name}' is unknown{meant}", name)


def test_fields_that_nothing_reads_are_listed(client: FlaskClient) -> None:
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "mood": "good"}]}],
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "user": "ann", "zebra": 1,
    }  # fmt: skip
    assert set(client.post("/v1/responses", json=body).json["ignored"]) == {
        "input[0].content[0].mood", "reasoning", "include[0]", "zebra",
    }  # fmt: skip
    assert client.post("/v1/responses", json={**body, "strict": True}).status_code == 400
    body = message({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "mood": "good"})
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto", "zebra": 1}
    named = {"messages[0].content[0].mood", "thinking", "zebra"}
    assert set(client.post("/v1/messages", json=body).json["ignored"]) == named
    assert set(client.post("/v1/messages/count_tokens", json=body).json["ignored"]) == named
    options = {"include_obfuscation": True, "include_usage": True}
    body = {"input": "a", "stream": True, "stream_options": options}
    *_, last = events(client.post("/v1/responses", json=body).text)
    assert last["response"]["ignored"] == [f"stream_options.{name}" for name in options]


def test_a_chat_that_does_not_fit_loses_its_oldest_turns() -> None:
    engine = FakeEngine()
    client = create_app(Settings(), engine=engine).test_client()
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"instructions": "Be brief.", "input": [*turn * 8, {"role": "user", "content": "last"}]}

    submit = engine.submit

    def short(request: Any) -> Any:
        if len(request.messages) > 6:
            raise ContextOverflow(128, 200, 190)
        return submit(request)

    engine.submit = short  # type: ignore[method-assign]
    refused = client.post("/v1/responses", json=body).json["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    answer = client.post("/v1/responses", json={**body, "truncation": "auto"}).json
    assert (answer["status"], answer["truncation"]) == ("completed", "auto")
    (asked,) = engine.requests
    assert [message["role"] for message in asked.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert asked.messages[-1]["content"] == "last"
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": data_uri()}]}
    alone = {"input": [picture], "truncation": "auto"}
    assert client.post("/v1/responses", json=alone).status_code == 200


def test_at_most_64_ignored_fields_are_named(client: FlaskClient) -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": ""}] * 200
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": thoughts},
        {"role": "user", "content": "b"},
    ]
    for path, body in (
        ("/v1/responses", {"input": "a", "stream_options": {f"option{number}": 1 for number in range(200)}}),
        ("/v1/messages", {"max_tokens": 4, "messages": turns}),
        ("/v1/messages/count_tokens", {"messages": turns}),
    ):
        assert len(client.post(path, json=body).json["ignored"]) == 64, path
