"""The API document as its page shows it: routes by tag, and every schema as a table."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markupsafe import Markup, escape

_INLINE = MarkdownIt("zero").enable("backticks")
_SCHEMA = "#/components/schemas/"
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


class ShownField(NamedTuple):
    """A row of a table: a field or parameter, its type with limits and default, and its description."""

    name: str
    type: Markup
    required: bool
    about: Markup


class Table(NamedTuple):
    """A schema that is an object."""

    name: str
    about: Markup
    rows: list[ShownField]


class ShownExample(NamedTuple):
    """An example of a request body."""

    title: str
    body: str


class Route(NamedTuple):
    """An operation; `answers` holds (status, description, types by media type)."""

    id: str
    method: str
    path: str
    title: Markup
    about: Markup
    open: bool
    parameters: list[ShownField]
    bodies: list[tuple[str, Markup]]
    examples: list[ShownExample]
    answers: list[tuple[str, Markup, list[tuple[str, Markup]]]]


def reference(document: dict[str, Any]) -> dict[str, Any]:
    """Return the template's values: `title`, `version`, `about`, `tags` (name, note, routes) and `schemas`."""
    responses = document["components"]["responses"]
    routes = [
        (operation["tags"][0], _route(method, path, operation, responses))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return {
        **document["info"],
        "about": rich(document["info"]["description"]),
        "tags": [
            (tag["name"], rich(tag["description"]), [route for name, route in routes if name == tag["name"]])
            for tag in document["tags"]
        ],
        "schemas": [
            Table(name, rich(schema.get("description", "")), rows_of(schema))
            for name, schema in document["components"]["schemas"].items()
        ],
    }


def _route(method: str, path: str, operation: dict[str, Any], responses: dict[str, Any]) -> Route:
    content = operation.get("requestBody", {}).get("content", {})
    examples = [
        ShownExample(example["summary"], json.dumps(example["value"], indent=2, ensure_ascii=False))
        for media in content.values()
        for example in media.get("examples", {}).values()
    ]
    answers = []
    for status, answer in operation["responses"].items():
        response = responses[answer["$ref"].rpartition("/")[2]] if "$ref" in answer else answer
        types = [(kind, type_of(media["schema"])) for kind, media in response["content"].items()]
        answers.append((status, rich(response["description"]), types))
    return Route(
        operation["operationId"],
        method.upper(),
        path,
        rich(operation["summary"]),
        rich(operation.get("description", "")),
        operation.get("security") == [],
        [
            ShownField(
                parameter["name"],
                type_of(parameter["schema"]),
                parameter.get("required", False),
                rich(parameter["description"]),
            )
            for parameter in operation.get("parameters", [])
        ],
        [(kind, type_of(media["schema"])) for kind, media in content.items()],
        examples,
        answers,
    )


def rows_of(schema: dict[str, Any]) -> list[ShownField]:
    """Return the fields of an object."""
    required = schema.get("required", ())
    return [
        ShownField(name, _full(field), name in required, rich(field.get("description", "")))
        for name, field in schema.get("properties", {}).items()
    ]


def rich(text: str) -> Markup:
    """Return a text as markup, with its `code` marked."""
    return Markup(_INLINE.renderInline(" ".join(text.split())))  # escapes everything else


def type_of(schema: dict[str, Any]) -> Markup:
    """Return a schema in a few words, with links to the tables of others."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        return Markup('<a href="#schema-{0}">{0}</a>').format(name)
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return Markup(", ").join(_value(value) for value in schema["enum"])
    if some := schema.get("anyOf") or schema.get("oneOf"):
        return Markup(" or ").join(type_of(option) for option in some)
    kind = schema.get("type", "anything")
    if kind == "array":
        if "prefixItems" in schema:
            return Markup("[{}]").format(Markup(", ").join(type_of(item) for item in schema["prefixItems"]))
        return Markup("list of {}").format(type_of(schema.get("items", {})))
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return Markup("object of {}").format(type_of(values))
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _full(schema: dict[str, Any]) -> Markup:
    """Return the type of a field with its range and its default."""
    some = [schema, *schema.get("anyOf", [])]
    limits = {name: value for part in reversed(some) for name, value in part.items() if name in _LIMITS}
    notes = [f"{words} {_number(limits[name])}" for name, words in _LIMITS.items() if name in limits]
    if schema.get("default") is not None:
        notes.append(f"default {json.dumps(schema['default'])}")
    return Markup("{} <small>{}</small>").format(type_of(schema), ", ".join(notes)) if notes else type_of(schema)


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _value(value: Any) -> Markup:
    return Markup("<code>{}</code>").format(json.dumps(value, ensure_ascii=False))
