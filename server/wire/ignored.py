"""Fields of a body that nothing reads: an answer names them, so that a slip of the pen is no silent no-op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from server.wire.strangers import UNUSED
from steering.protocol.wording import path_of

MOST = 64
"""Paths that are named."""
LONGEST = 64
"""Characters of a name."""

Schema = Mapping[str, Any]


@dataclass
class Shape:
    """What may stand in one place of a body: the names that are known there, all of them where it is `open`; what stands
    under them; what its `items` are. kinds: by the value of "type", where alternatives are told apart by it."""

    open: bool = True
    known: Mapping[str, Shape] = field(default_factory=dict)
    items: Shape | None = None
    kinds: Mapping[str, Shape] = field(default_factory=dict)


def ignored_fields(body: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return the paths of the fields of a body that its model does not know, as `messages[0].name`, `MOST` at most; null and
    what is empty ask for nothing."""
    found: list[str] = []
    known = {name: value for name, value in body.items() if name not in UNUSED}
    for path in _unknown(known, shape_of(kind), ()):
        found.append(path_of(path))
        if len(found) == MOST:
            break
    return found


def _unknown(value: Any, shape: Shape, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, list) and shape.items is not None:
        for i, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from _unknown(item, shape.items, (*path, i))
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    shape = shape.kinds.get(kind, shape) if isinstance(kind, str) else shape
    if shape.open:
        return
    for name, item in value.items():
        if (inner := shape.known.get(name)) is not None:
            if isinstance(item, dict | list):
                yield from _unknown(item, inner, (*path, name))
        elif item not in (None, "", [], {}):
            yield (*path, name[:LONGEST])


@lru_cache(maxsize=16)
def shape_of(kind: type[BaseModel]) -> Shape:
    """Return the shape of the bodies that a model reads, out of their JSON schema."""
    schema = kind.model_json_schema()
    return _shape([schema], schema.get("$defs", {}))


def _shape(schemas: Sequence[Schema], defs: Mapping[str, Schema]) -> Shape:
    alternatives = [one for schema in schemas for one in _alternatives(schema, defs)]
    items = [one["items"] for one in alternatives if "items" in one]
    inner = _shape(items, defs) if items else None
    objects = [one for one in alternatives if one.get("type", "object") == "object"]
    if not objects or any(one.get("additionalProperties", "properties" not in one) for one in objects):
        return Shape(items=inner)
    types = [_types(one) for one in objects]
    kinds = (
        {word: _object([one for one in objects if word in _types(one)], defs) for words in types for word in words}
        if len(objects) > 1 and all(types)
        else {}
    )
    return Shape(False, _object(objects, defs).known, inner, kinds)


def _object(objects: Sequence[Schema], defs: Mapping[str, Schema]) -> Shape:
    under: dict[str, list[Schema]] = {}
    for one in objects:
        for name, schema in one["properties"].items():
            under.setdefault(name, []).append(schema)
    return Shape(False, {name: _shape(schemas, defs) for name, schemas in under.items()})


def _alternatives(schema: Schema, defs: Mapping[str, Schema]) -> list[Schema]:
    """Return the schemas of which a value follows one, without references."""
    if "$ref" in schema:
        return _alternatives(defs[schema["$ref"].rpartition("/")[2]], defs)
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return [one for part in several for one in _alternatives(part, defs)] if several else [schema]


def _types(schema: Schema) -> Sequence[str]:
    """Return the values that "type" may have, none where it may have any."""
    stated = schema["properties"].get("type", {})
    return [stated["const"]] if "const" in stated else stated.get("enum", [])
