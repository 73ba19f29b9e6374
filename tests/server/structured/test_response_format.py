"""Errors name the part of a `response_format` that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from server.errors import BadRequest
from tests.server.wire.test_wire import CHAT, parse


def described(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


WRONG: list[tuple[Any, str, str]] = [
    ("text", "", "invalid_value"),
    ({"type": "xml"}, ".type", "invalid_value"),
    ({}, ".type", "missing_required_parameter"),
    (described(name="a"), ".json_schema.schema", "missing_required_parameter"),
    (described(schema=True), ".json_schema.schema", "invalid_value"),
    (described(schema={}, strict="yes"), ".json_schema.strict", "invalid_value"),
]
BETWEEN_FIELDS: list[tuple[Any, str, str]] = [
    ({"type": "json_schema"}, "", "invalid_value"),
    ({"type": "text", "json_schema": {"schema": {}}}, "", "invalid_value"),
    (described(schema={}, strickt=True), ".json_schema.strickt", "unknown_parameter"),
]


@pytest.mark.parametrize(("form", "place", "code"), [*WRONG, *BETWEEN_FIELDS])
def test_what_is_wrong_is_named(form: Any, place: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(response_format=form)
    assert (caught.value.param, caught.value.code) == (f"response_format{place}", code)


def test_the_schema_of_the_document_says_as_much() -> None:
    schema = Draft202012Validator(CHAT.model_json_schema())
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for wrong, _, _ in WRONG:
        assert not schema.is_valid({**chat, "response_format": wrong}), wrong
    for right in ({"type": "text"}, {"type": "json_object"}, described(schema={}, strict=None), None):
        assert schema.is_valid({**chat, "response_format": right})
        assert parse(response_format=right).response_format is not None or right is None
