"""Closed and open schemas of objects, and the answers that they allow."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict

from steering import Grammar
from steering.grammar.closing import close
from tests.waiting import computing_within

BYTES = LLTokenizer("byte")
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
SHUT = {"additionalProperties": False}


def follows(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is a possible answer under a schema."""
    matcher = LLMatcher(BYTES, Grammar.json_schema(schema).text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


class Inner(BaseModel):
    x: int


class Outer(BaseModel):
    inner: Inner
    many: list[Inner]
    names: dict[str, int]


def test_schemas_of_plain_pydantic_classes_are_closed() -> None:
    schema = Outer.model_json_schema()
    good = {"inner": {"x": 1}, "many": [{"x": 2}], "names": {"any": 3}}
    assert follows(schema, json.dumps(good))
    for spoilt in ({**good, "y": 1}, {**good, "inner": {"x": 1, "y": 1}}, {**good, "many": [{"x": 2, "y": 1}]}):
        assert not follows(schema, json.dumps(spoilt))


def test_schemas_that_mention_additional_properties_stay_open() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        a: int

    more = '{"a": 1, "b": 2}'
    assert not follows(A, more)
    for schema in (Open.model_json_schema(), A | {"additionalProperties": {"type": "integer"}}, {"type": "object"}):
        assert follows(schema, more), schema
    for beside in ({"minProperties": 2}, {"required": ["a", "b"]}):
        assert follows(A | beside, more)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        A | {"allOf": [B]},
        {"$defs": {"A": A, "B": {"allOf": [{"$ref": "#/$defs/A"}, B]}}, "$ref": "#/$defs/B"},
        A | {"anyOf": [B, {"type": "object", "properties": {"c": {}}}]},
    ],
)
def test_schemas_of_the_same_object_do_not_exclude_one_another(schema: dict[str, Any]) -> None:
    assert follows(schema, '{"a": 1, "b": 2}') or follows(schema, '{"b": 2, "a": 1}')


def test_each_alternative_is_closed() -> None:
    assert follows({"anyOf": [A, B]}, '{"b": 2}')
    assert not follows({"anyOf": [A, B]}, '{"a": 1, "b": 2}')
    assert not follows({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, '{"a": 1, "b": 2}')


def test_only_schemas_are_touched() -> None:
    """A property that is called as a keyword, and values that look like schemas."""
    schema = {"properties": {"properties": {"const": {"properties": {}}}, "items": {"enum": [A]}, "default": A}}
    closed = json.loads(json.dumps(schema))
    close(closed)
    assert closed == {"properties": {**schema["properties"], "default": A | SHUT}, **SHUT}


def test_dangling_and_circular_references_are_left_unchanged() -> None:
    for target in ("#/nothing/0", "#a", "http://x/", "#", 3):
        schema: dict[str, Any] = {"$ref": target, "allOf": [A, {"$ref": "#/allOf/1"}, 3], "anyOf": {}, "$defs": []}
        closed = copy.deepcopy(schema)
        close(closed)
        assert closed == schema
    tree: dict[str, Any] = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "type": "object"}
    assert follows(tree, '{"next": {"next": null}}')
    assert not follows(tree, '{"next": {"more": null}}')


def test_many_references_are_resolved_quickly() -> None:
    twice = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    schema = {"anyOf": [copy.deepcopy(twice) for _ in range(1600)]}
    with computing_within(1):
        close(schema)
