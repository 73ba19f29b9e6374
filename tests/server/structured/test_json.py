"""Answers that must be JSON, over HTTP: of the embedded model, which of itself says nothing of the kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from flask import Flask
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from server.app import create_app
from server.settings import Settings
from tests.server.api.choices import QUESTION, choice_of, refused
from tests.server.conftest import data_uri, user
from tests.server.fakes import FakeEngine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}
CHAT = "/v1/chat/completions"


def asking(schema: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA if schema is None else schema}}
    return {"messages": [user(data_uri(), QUESTION)], "max_tokens": 80, "response_format": form, **fields}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.5, "seed": 4, "n": 2},
        {"steering": {"toward": "vision"}, "diagnostics": True},
        {"sage": True},
        {"sage": {"generate": {"refresh": 5}}, "n": 2},
        {"contrast": {"kind": "vcd"}, "temperature": 1.0},
    ],
)
def test_an_answer_is_what_the_schema_describes(client: FlaskClient, more: dict[str, Any]) -> None:
    response = client.post(CHAT, json=asking(**more))
    choice_of(response)
    for choice in response.json["choices"]:
        Draft202012Validator(SCHEMA).validate(json.loads(choice["message"]["content"]))
        assert choice["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_same_answer(client: FlaskClient) -> None:
    whole = choice_of(client.post(CHAT, json=asking(baseline=True, logprobs=True)))
    text = client.post(CHAT, json=asking(stream=True)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert said == whole["message"]["content"] == whole["baseline"]["message"]["content"]
    assert "".join(token["token"] for token in whole["logprobs"]["content"]) == said


def test_a_json_object_is_one(client: FlaskClient) -> None:
    choice = choice_of(client.post(CHAT, json=asking(response_format={"type": "json_object"}, max_tokens=200)))
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


def test_an_answer_that_is_cut_off_says_so(client: FlaskClient) -> None:
    assert choice_of(client.post(CHAT, json=asking(max_tokens=4)))["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"schema": {"not": {"type": "null"}}}, "response_format.json_schema.schema", "not"),
        ({"schema": {"type": "string", "pattern": "(?<=a)b"}}, "response_format.json_schema.schema", "look-behind"),
        ({"schema": {"enum": ["x" * 70_000]}}, "response_format.json_schema.schema", "65536"),
        ({"force": "red"}, "force", "response_format"),
        ({"ignore_eos": True}, "ignore_eos", "response_format"),
    ],
)
def test_what_cannot_be_enforced_is_named(client: FlaskClient, fields: dict[str, Any], param: str, said: str) -> None:
    error = refused(client.post(CHAT, json=asking(**fields)))
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"choice": ["A heart.", "A star."]}, r"A heart\.|A star\."),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
    ],
)
def test_structured_outputs_are_taken_as_vllm_takes_them(client: FlaskClient, asked: dict[str, Any], said: str) -> None:
    choice = choice_of(client.post(CHAT, json=asking(response_format=None, structured_outputs=asked)))
    assert re.fullmatch(said, choice["message"]["content"])
    error = refused(client.post(CHAT, json=asking(structured_outputs=asked)))
    assert (error["param"], "mutually exclusive" in error["message"]) == ("structured_outputs", True)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"grammar": "root ::= a"}, "structured_outputs.grammar"),
        ({"regex": "(?=a)"}, "structured_outputs.regex"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"json": {"not": {}}}, "structured_outputs.json"),
    ],
)
def test_what_of_structured_outputs_is_wrong_is_named(client: FlaskClient, asked: dict[str, Any], param: str) -> None:
    error = refused(client.post(CHAT, json=asking(response_format=None, structured_outputs=asked)))
    assert error["param"] == param


def test_advice_is_given_where_it_can_be_followed(client: FlaskClient) -> None:
    """Messages and `structured_outputs` have no field that makes a format lenient."""
    schema = {"type": "string", "format": "colour"}
    chat = asking(schema)
    plain = {name: value for name, value in chat.items() if name not in ("response_format", "messages")}
    question = [{"role": "user", "content": QUESTION}]
    form, advice = {"type": "json_schema", "schema": schema}, " With '{}': false it is left aside."
    for path, body, strict in (
        (CHAT, chat, "response_format.json_schema.strict"),
        (CHAT, {**chat, "response_format": None, "structured_outputs": {"json": schema}}, None),
        ("/v1/messages", {**plain, "messages": question, "output_config": {"format": form}}, None),
        ("/v1/responses", {"input": QUESTION, "text": {"format": {**form, "name": "a"}}}, "text.format.strict"),
    ):
        said = client.post(path, json=body).json["error"]["message"]
        assert re.fullmatch(r"'[^']*' cannot be enforced: Unknown format: colour\.(.*)", said)
        assert said.partition("colour.")[2] == (advice.format(strict) if strict else "")
    for path, body in (
        (
            CHAT,
            {
                **chat,
                "max_tokens": 4,
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}},
            },
        ),
        (
            "/v1/responses",
            {
                "input": QUESTION,
                "max_output_tokens": 4,
                "text": {"format": {**form, "name": "a", "strict": False}},
            },
        ),
    ):
        assert client.post(path, json=body).status_code == 200, "the advice is right"


def test_an_engine_without_grammars_is_asked_for_none(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    error = refused(client.post(CHAT, json=asking()))
    assert (error["param"], error["code"]) == ("response_format", "unsupported_value")


def test_the_openai_package_parses_what_it_asked_for(app: Flask, live: Callable[[Flask], str]) -> None:
    class Thing(BaseModel):
        colour: Literal["red", "green"]
        sure: list[bool] = Field(max_length=3)

    with openai.OpenAI(base_url=f"{live(app)}/v1", api_key="none", max_retries=0) as sdk:
        completion = sdk.chat.completions.parse(
            model="helmsight-demo",
            messages=[{"role": "user", "content": QUESTION}],
            response_format=Thing,
            max_tokens=100,
        )
    assert isinstance(completion.choices[0].message.parsed, Thing)
