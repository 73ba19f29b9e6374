"""Schemas that are closed: an object has the properties that its schema names, and none that a model thinks of."""

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
"""What speaks of properties that are not named: who writes it has thought of them."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
"""Where schemas stand within a schema."""


def close(root: Schema) -> None:
    """Forbid properties that are not named in every schema that names some and does not speak of others.

    Where several schemas hold for the same object (`allOf`, or a reference with more beside it), each would forbid what the
    others name: they stay as they are.
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
    """Whether it says something of properties that it does not name."""
    named, required = node.get("properties") or {}, node.get("required")
    beyond = isinstance(required, list) and any(name not in named for name in required)
    return beyond or any(name in node for name in _OPENING)


def nodes_of(root: Schema) -> Iterator[Schema]:
    """All schemas within one."""
    left: list[Any] = [root]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name, value in node.items():
            if name in _MAPS and isinstance(value, dict):
                left.extend(value.values())
            elif name in _LISTS or (name == "items" and isinstance(value, list)):
                left.extend(value if isinstance(value, list) else ())
            elif name in _SINGLE:
                left.append(value)


def _parts(root: Schema, node: Schema) -> list[list[Schema]]:
    """What holds for a value beside what a node itself says of it: of each list one schema does."""
    parts = [[one] for one in _listed(node, "allOf")]
    parts += [_listed(node, "anyOf"), _listed(node, "oneOf"), [_found(root, node.get("$ref"))]]
    return [kept for part in parts if (kept := [one for one in part if isinstance(one, dict)])]


def _same(root: Schema, nodes: list[Schema]) -> set[int]:
    """The ids of these, and of all that hold for the same value as one of them."""
    found: set[int] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if id(node) not in found:
            found.add(id(node))
            left.extend(one for part in _parts(root, node) for one in part)
    return found


def _listed(node: Schema, name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []


def _found(root: Schema, reference: Any) -> Any:
    """What a reference within the schema points to; None where that is nothing."""
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
