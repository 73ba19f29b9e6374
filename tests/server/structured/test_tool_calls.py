"""Tools over HTTP, of a tiny model whose template knows them, and of the embedded one, whose does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from flask import Flask
from jsonschema import Draft202012Validator

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.api.choices import choice_of, refused

CHAT = "/v1/chat/completions"
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["top", "bottom"]}, "closely": {"type": "boolean"}},
    "required": ["at", "closely"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": LOOK, "strict": True}},
    {"type": "function", "function": {"name": "count"}},
]
QUESTION = [{"role": "user", "content": "What is at the top?"}]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def caller(root: Path) -> Iterator[Flask]:
    """Yield the application on a model whose template knows tools."""
    model = steering.load(calling(root), device="cpu")
    engine = steering.Engine(model, slots=4, max_length=1024, self_check=False, threads=1)
    engine.start()
    yield create_app(Settings(), engine=engine)
    engine.stop()


def asking(**fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "tools": TOOLS, "temperature": 1.2, "seed": 3, "max_tokens": 200, **fields}


def events(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:])["choices"][0] for line in response.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("words", [1_500, 20_000])
def test_tools_that_are_too_long_are_named(caller: Flask, words: int) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Look. " * words}}]
    error = refused(caller.test_client().post(CHAT, json=asking(tools=tools)))
    assert (error["param"], error["code"]) == ("tools", "context_length_exceeded")
    assert error["message"].endswith("Please reduce the length of 'tools'.")


def test_a_named_tool_is_called_as_its_parameters_say(caller: Flask) -> None:
    choice = choice_of(caller.test_client().post(CHAT, json=asking(tool_choice=NAMED, parallel_tool_calls=False)))
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]["name"], call["id"][:5]) == ("function", "look", "call_")
    Draft202012Validator(LOOK).validate(json.loads(call["function"]["arguments"]))


def test_a_stream_of_calls_adds_up(caller: Flask) -> None:
    client = caller.test_client()
    body = asking(tool_choice="required", logprobs=True)
    whole = choice_of(client.post(CHAT, json=body))
    found: dict[int, dict[str, str]] = {}
    streamed = events(client.post(CHAT, json=body | {"stream": True}))
    for event in streamed:
        for piece in event["delta"].get("tool_calls", ()):
            if piece["index"] not in found:
                assert piece["id"].startswith("call_")
                found[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
            found[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert [call["function"] for call in whole["message"]["tool_calls"]] == list(found.values())
    assert "".join(event["delta"].get("content") or "" for event in streamed) == ""
    assert streamed[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    logprobs = [one for event in streamed if event["logprobs"] for one in event["logprobs"]["content"]]
    assert [one["token"] for one in logprobs] == [one["token"] for one in whole["logprobs"]["content"]]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_format_has_no_effect_on_a_required_call(caller: Flask, choice: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a star"]}}}
    client, body = caller.test_client(), asking(tool_choice=choice, parallel_tool_calls=False)
    with_format = choice_of(client.post(CHAT, json=body | {"response_format": form}))["message"]
    without = choice_of(client.post(CHAT, json=body))["message"]
    functions = [[call["function"] for call in message["tool_calls"]] for message in (with_format, without)]
    assert with_format["content"] is None
    assert functions[0] == functions[1] != []


def test_a_format_is_followed_where_no_tool_is_called(caller: Flask, root: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a star"]}}}
    client, found = caller.test_client(), list[Any]()
    begins, *_ = steering.load(calling(root), device="cpu", unread="").tokenizer("<tool_call>").input_ids
    for bias in (100, -100):
        body = asking(response_format=form, parallel_tool_calls=False, logit_bias={str(begins): bias})
        choice = choice_of(client.post(CHAT, json=body))
        streamed = events(client.post(CHAT, json=body | {"stream": True}))
        text = "".join(event["delta"].get("content") or "" for event in streamed)
        assert text == (choice["message"]["content"] or "")
        assert streamed[-1]["finish_reason"] == choice["finish_reason"]
        found.append((choice["finish_reason"], text, len(choice["message"].get("tool_calls") or ())))
    assert found == [("tool_calls", "", 1), ("stop", '"a star"', 0)]


def test_a_format_without_tools_to_call_is_followed(caller: Flask) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a star"]}}}
    choice = choice_of(caller.test_client().post(CHAT, json=asking(tool_choice="none", response_format=form)))
    assert choice["message"]["content"] == '"a star"'


def test_what_was_called_and_what_came_of_it_is_read_on(caller: Flask) -> None:
    client = caller.test_client()
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "top"}'}}
    chat = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "A star."},
    ]
    lengths = [
        client.post(CHAT, json={"messages": messages, "max_tokens": 1, **more}).json["usage"]["prompt_tokens"]
        for messages, more in (
            (QUESTION, {}),
            (QUESTION, {"tools": TOOLS, "tool_choice": "none"}),
            (QUESTION, {"tools": TOOLS}),
            (chat, {}),
            (chat, {"tools": TOOLS}),
        )
    ]
    assert lengths[0] == lengths[1] < lengths[2]
    assert lengths[4] - lengths[3] == lengths[2] - lengths[0] > 0
    assert lengths[3] > lengths[0]


def test_a_call_in_an_answer_of_the_models_own_is_found(caller: Flask) -> None:
    said = 'I count.\n<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    choice = choice_of(caller.test_client().post(CHAT, json=asking(force=said)))
    assert choice["message"]["content"] == "I count."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "count", "arguments": "{}"}]


def test_the_beginning_of_a_call_that_must_be_is_no_text(caller: Flask) -> None:
    client, body = caller.test_client(), asking(tool_choice=NAMED, max_tokens=5)
    choice = choice_of(client.post(CHAT, json=body))
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert not any(event["delta"].get("content") for event in events(client.post(CHAT, json=body | {"stream": True})))


@pytest.mark.parametrize("fields", [{}, {"stop": ['"name']}], ids=["length", "stop"])
def test_the_beginning_of_a_call_that_may_be_is_no_text(caller: Flask, fields: dict[str, Any]) -> None:
    client, call = caller.test_client(), '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    body, expected = asking(force=f"I count.\n{call}", **fields), "stop" if fields else "length"
    found = set()
    for most in range(2, 60, 4):
        choice = choice_of(client.post(CHAT, json=body | {"max_tokens": most}))
        streamed = events(client.post(CHAT, json=body | {"max_tokens": most, "stream": True}))
        text, calls = choice["message"]["content"] or "", len(choice["message"].get("tool_calls") or ())
        assert "".join(event["delta"].get("content") or "" for event in streamed) == text
        assert "I count.".startswith(text.removesuffix("\n<").removesuffix("\n")), "no call"
        assert streamed[-1]["finish_reason"] == choice["finish_reason"]
        found.add((choice["finish_reason"], calls))
    assert (expected, 0) in found
    assert any(calls for _, calls in found) == (not fields)


def test_half_a_call_is_none_to_act_upon(caller: Flask) -> None:
    client, body = caller.test_client(), asking(tool_choice=NAMED, stop=["top", "bottom"])
    choice = choice_of(client.post(CHAT, json=body))
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call["function"]["arguments"])
    assert choice["finish_reason"] == "stop"
    assert events(client.post(CHAT, json=body | {"stream": True}))[-1]["finish_reason"] == "stop"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "must name one of the tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "must be 'function'; got 'allowed_tools'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "unique function names"),
    ({"tool_choice": "required", "force": "No."}, "force", "exclude one another"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
        },
        "tools",
        "not",
    ),
    (
        {
            "messages": [
                *QUESTION,
                {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{"}}]},
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
        "JSON object",
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_what_is_wrong_is_named(caller: Flask, fields: dict[str, Any], param: str, said: str) -> None:
    error = refused(caller.test_client().post(CHAT, json=asking(**fields)))
    assert error["param"] == param
    assert said in error["message"]


def test_a_model_whose_template_knows_no_tools_says_so(app: Flask) -> None:
    client = app.test_client()
    for fields, param in (
        ({"tools": TOOLS}, "tools"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "A star."}], "tools": []}, "messages[1]"),
    ):
        error = refused(client.post(CHAT, json=asking(**fields)))
        assert (error["param"], error["code"]) == (param, "unsupported_value")
        lenient = client.post(CHAT, json=asking(**fields, strict=False))
        assert lenient.status_code == (200 if param == "tools" else 400), "earlier calls are of the prompt"
        assert "supports no tools" in error["message"]
    assert choice_of(client.post(CHAT, json=asking(tool_choice="none", max_tokens=1)))["finish_reason"] == "length"


def test_the_openai_package_understands_calls(caller: Flask, live: Callable[[Flask], str]) -> None:
    with openai.OpenAI(base_url=f"{live(caller)}/v1", api_key="none", max_retries=0) as sdk:
        model = sdk.models.list().data[0].id
        asked: dict[str, Any] = asking(tool_choice=NAMED, parallel_tool_calls=False)
        parsed = sdk.chat.completions.parse(model=model, **{**asked, "tools": TOOLS[:1]})
        with sdk.chat.completions.stream(model=model, **{**asked, "tools": TOOLS[:1]}) as stream:
            final = stream.get_final_completion()
    for completion in (parsed, final):
        (call,) = completion.choices[0].message.tool_calls or ()
        assert call.function.name == "look"
        assert set(call.function.parsed_arguments or ()) == {"at", "closely"}
