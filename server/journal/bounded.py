"""What clients and the engine say, made small enough for a row: long lists become their statistics, texts are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.encode import dumps

MAX_ITEMS = 64
MAX_TEXT = 256
MAX_DEPTH = 6
MAX_JSON = 16_384
"""Characters of one JSON column."""


def encoded(value: Any) -> str:
    """JSON of at most MAX_JSON characters; what is larger even after `bounded` says only so."""
    text = dumps(bounded(value))
    return text if len(text) <= MAX_JSON else dumps({"omitted": len(text)})


def bounded(value: Any, depth: int = 0) -> Any:
    """`value` with at most MAX_ITEMS entries in each list and object, MAX_DEPTH levels and MAX_TEXT characters a text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) < 2**63 else number(value)
    if isinstance(value, str):
        return clean(value, MAX_TEXT)
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        return {clean(str(key), MAX_ITEMS): bounded(item, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        if len(value) <= MAX_ITEMS:
            return [bounded(item, depth + 1) for item in value]
        return statistics(value) or {"count": len(value), "first": [bounded(x, depth + 1) for x in value[:MAX_ITEMS]]}
    return type(value).__name__


def statistics(values: Any) -> dict[str, Any] | None:
    """Count, mean and maximum of a list of numbers; None where it holds anything else."""
    if not isinstance(values, (list, tuple)):
        return None
    found = [x for x in map(number, values) if x is not None]
    if len(found) < len(values) - sum(value is None for value in values):
        return None
    return {
        "count": len(values),
        "mean": sum(found) / len(found) if found else None,
        "max": max(found) if found else None,
    }


def clean(text: str, limit: int, end: bool = False) -> str:
    """At most `limit` characters, the first ones or the last; without what a database cannot hold as text."""
    if len(text) > limit:
        text = "…" + text[len(text) - limit + 1 :] if end else text[: limit - 1] + "…"
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def number(value: Any) -> float | None:
    """A finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def changed(tree: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """A copy of nested objects in which what stands at a path is changed; the same where nothing stands there."""
    if not path:
        return change(tree)
    head, *rest = path
    if not isinstance(tree, Mapping) or tree.get(head) is None:
        return tree
    return {**tree, head: changed(tree[head], rest, change)}
