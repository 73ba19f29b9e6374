"""Closed schemas: an object has the properties that its schema names, and none that a model invents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_NAMING = ("properties", "patternProperties")
_OPENING = (
    "additionalProperties", "unevaluatedProperties", "minProperties", "propertyNames", "dependentSchemas",
    "dependentRequired",
)  # fmt: skip
"""Keywords about unnamed properties; a schema that uses one is left as its author wrote it."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
"""Keywords whose value is a single schema; the two above hold maps and lists of schemas."""


def close(root: Schema) -> None:
    """Forbid unnamed properties in every schema that names some and has no keyword about others.

    Where several schemas hold for the same object (`allOf`, or a reference with other keywords), each would forbid the
    properties that the others name; these stay as they are.
    """
    nodes = list(nodes_of(root))
    several = [node for node in nodes if len(_parts(root, node)) + _names(node) > 1]
    together = _same(root, several)
    for node in nodes:
        if _names(node) and id(node) not in together and not _asks_for_more(node):
            node["additionalProperties"] = False


def _names(node: Schema) -> bool:
    return any(isinstance(node.get(name), dict) for name in _NAMING)


def _asks_for_more(node: Schema) -> bool:
    """Return whether a schema has rules for properties that it does not name."""
    properties, required = node.get("properties") or {}, node.get("required")
    beyond = isinstance(required, list) and any(name not in properties for name in required)
    return beyond or any(name in node for name in _OPENING)


def nodes_of(root: Schema) -> Iterator[Schema]:
    """Yield all schemas within one."""
    pending: list[Any] = [root]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name, value in node.items():
            if name in _MAPS and isinstance(value, dict):
                pending.extend(value.values())
            elif name in _LISTS or (name == "items" and isinstance(value, list)):
                pending.extend(value if isinstance(value, list) else ())
            elif name in _SINGLE:
                pending.append(value)


def _parts(root: Schema, node: Schema) -> list[list[Schema]]:
    """Return lists of the schemas that hold for a value besides the node's own keywords; of each list one must hold."""
    parts = [[part] for part in _list_of(node, "allOf")]
    parts += [_list_of(node, "anyOf"), _list_of(node, "oneOf"), [_resolve(root, node.get("$ref"))]]
    return [schemas for part in parts if (schemas := [schema for schema in part if isinstance(schema, dict)])]


def _same(root: Schema, nodes: list[Schema]) -> set[int]:
    """Return the ids of these nodes, and of all that hold for the same value as one of them."""
    ids: set[int] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if id(node) not in ids:
            ids.add(id(node))
            pending.extend(schema for part in _parts(root, node) for schema in part)
    return ids


def _list_of(node: Schema, name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []


def _resolve(root: Schema, reference: Any) -> Any:
    """Return the target of a reference within the schema; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
