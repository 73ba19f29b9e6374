"""Shortening of values for a row: long lists become their statistics, texts are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.encode import dumps

MAX_ITEMS = 64
MAX_TEXT = 256
MAX_DEPTH = 6
MAX_JSON = 16_384
"""Largest number of characters of a JSON column."""


def encoded(value: Any) -> str:
    """Return JSON of at most MAX_JSON characters; a larger value becomes a note of its size."""
    text = dumps(bounded(value))
    return text if len(text) <= MAX_JSON else dumps({"omitted": len(text)})


def encoded_metadata(metadata: dict[str, str]) -> str:
    """Return the client's own keys and values unshortened, since the wire format bounds them."""
    return dumps({clean(key, 64): clean(value, 512) for key, value in metadata.items()})


def bounded(value: Any, depth: int = 0) -> Any:
    """Return `value` with at most MAX_ITEMS entries per list or object, MAX_DEPTH levels and MAX_TEXT characters a text."""
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
    """Return count, mean and maximum of a list of numbers; None if it holds anything else."""
    if not isinstance(values, (list, tuple)):
        return None
    numbers = [x for x in map(number, values) if x is not None]
    if len(numbers) < len(values) - sum(value is None for value in values):
        return None
    return {
        "count": len(values),
        "mean": sum(numbers) / len(numbers) if numbers else None,
        "max": max(numbers) if numbers else None,
    }


def clean(text: str, limit: int, end: bool = False) -> str:
    """Return at most `limit` characters, the first or the last ones, without those that a database cannot store."""
    if len(text) > limit:
        text = "…" + text[len(text) - limit + 1 :] if end else text[: limit - 1] + "…"
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def number(value: Any) -> float | None:
    """Return a finite number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def changed(tree: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested objects with the value at a path changed; the same object if there is none."""
    if not path:
        return change(tree)
    head, *tail = path
    if not isinstance(tree, Mapping) or tree.get(head) is None:
        return tree
    return {**tree, head: changed(tree[head], tail, change)}
