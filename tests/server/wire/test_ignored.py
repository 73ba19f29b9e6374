"""Ignored fields are named by their paths."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from server.wire.chat import ChatRequest, DryRun, with_interventions
from server.wire.parse import explain
from server.wire.strangers import ELSEWHERE, MOST_NAMED, UNUSED, ignored_fields
from tests.waiting import computing_within

CHAT = with_interventions(ChatRequest)
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return message(content=[{"type": "text", "text": "a"}, fields])


PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"banana": 1}, ["banana"]),
        ({"enable_thinking": False, "reasoning_effort": "low"}, ["enable_thinking", "reasoning_effort"]),
        ({"extra_body": {}}, []),
        (message(name="Ann"), ["messages[0].name"]),
        (message(tool_calls=[CALL | {"index": 0}]), ["messages[0].tool_calls[0].index"]),
        (part(type="text", text="b", cache_control={"type": "x"}), ["messages[0].content[1].cache_control"]),
        (part(**PICTURE, uuid="u", text="t"), ["messages[0].content[1].uuid", "messages[0].content[1].text"]),
        (part(type="image_url", image_url={"url": "data:", "fps": 1}), ["messages[0].content[1].image_url.fps"]),
        (part(type="input_image", image_url="data:", detail="low"), []),
        ({"stream_options": {"continuous_usage_stats": True}}, ["stream_options.continuous_usage_stats"]),
        (
            {"tools": [{"type": "function", "cached": 1, "function": {"name": "a", "parameters": {"x": {"y": 1}}}}]},
            ["tools[0].cached"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {}}, "lax": 1}}},
            ["response_format.json_schema.lax"],
        ),
        ({"structured_outputs": {"json": {"anything": {}}}, "metadata": {"mine": "x"}, "logit_bias": {"5": 1}}, []),
        ({"chat_template_kwargs": {"anything": {"at": "all"}}}, []),  # the model's template knows
        ({"steering": {"vectors": [{"name": "a", "strength": 1}]}, "sage": {"see": {"alpha": 1}}}, []),
        ({"banana": None, "pear": [], "plum": "", "fig": {}, "kiwi": 0}, ["kiwi"]),
    ],
)
def test_paths(body: dict[str, Any], paths: list[str]) -> None:
    assert ignored_fields(body, CHAT) == paths
    assert ignored_fields(body, with_interventions(DryRun)) == paths


def test_what_frameworks_send_by_themselves_is_not_named() -> None:
    said = ChatCompletionMessage(role="assistant", content="Hello.", refusal=None, annotations=[])
    assert ignored_fields({"messages": [said.model_dump()]} | dict.fromkeys(UNUSED | ELSEWHERE.keys(), "x"), CHAT) == []


def test_a_field_of_sdks_for_python_is_explained() -> None:
    with pytest.raises(ValidationError) as caught:
        CHAT.model_validate(message() | {"extra_body": {"sage": True}})
    problem = explain(caught.value)
    assert (problem.param, problem.code) == ("extra_body", "unsupported_value")
    assert problem.message.endswith("is an argument of SDKs for Python; put its fields in the request itself.")


def test_every_field_of_a_request_is_known() -> None:
    assert ignored_fields(dict.fromkeys(CHAT.model_fields, "x"), CHAT) == []


def test_many_and_long_names_cost_little() -> None:
    body = {f"{i}{'x' * 1000}": 1 for i in range(30_000)} | part(type="text", text="b")
    body["messages"][0]["content"] *= 15_000
    with computing_within(1):
        found = ignored_fields(body, CHAT)
    assert (len(found), max(map(len, found))) == (MOST_NAMED, 64)
