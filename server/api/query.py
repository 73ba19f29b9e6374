"""Parameters of a query, and errors that name a wrong one."""

from __future__ import annotations

import re
from typing import Any

from flask import request

from server.errors import BadRequest
from server.openapi.operation import Parameter
from server.wire.storing.metadata import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE

METADATA = "metadata"
_PAIR = re.compile(METADATA + r"\[(.+)\]", re.DOTALL)


def parameters(allowed: tuple[str, ...]) -> dict[str, str]:
    """Return the query's parameters; raises a 400 for unknown or repeated ones.

    With `METADATA` among them, those of the form `metadata[key]` are allowed, too.
    """
    query: dict[str, str] = {}
    for name, values in request.args.lists():
        if name not in allowed and not (METADATA in allowed and _PAIR.fullmatch(name)):
            hint = f"allowed: {', '.join(allowed)}" if allowed else "this route has no parameters"
            raise BadRequest(f"'{name[:64]}' is unknown; {hint}.", name[:64], "unknown_parameter")
        if len(values) > 1:
            raise BadRequest(f"'{name[:64]}' must be given once.", name[:64])
        query[name] = values[0]
    if METADATA in query:
        raise BadRequest("'metadata' must be given as metadata[key]=value.", METADATA)
    return query


def metadata_of(query: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of metadata among the parameters; raises a 400 beyond OpenAI's bounds."""
    pairs = [(match[1], value) for name, value in query.items() if (match := _PAIR.fullmatch(name))]
    if len(pairs) > MAX_METADATA:
        raise BadRequest(f"'metadata' must have at most {MAX_METADATA} keys; got {len(pairs)}.", METADATA)
    for key, value in pairs:
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise BadRequest(
                f"'metadata' must have keys of at most {MAX_METADATA_KEY} characters, and values of at most "
                f"{MAX_METADATA_VALUE}.",
                METADATA,
            )
    return tuple(pairs)


def integer(query: dict[str, str], name: str, largest: int) -> int | None:
    """Return a positive integer among the parameters, None if it is missing; raises a 400."""
    if name not in query:
        return None
    text = query[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= largest):
        raise BadRequest(f"'{name}' must be an integer from 1 to {largest}; got {text[:64]!r}.", name)
    return int(text)


def word(query: dict[str, str], name: str, words: tuple[str, ...]) -> str:
    """Return one of a few words among the parameters, by default the first; raises a 400."""
    value = query.get(name, words[0])
    if value not in words:
        raise BadRequest(f"'{name}' must be one of {', '.join(words)}; got {value[:64]!r}.", name)
    return value


def metadata_parameter() -> Parameter:
    """Return the description of the filter on metadata."""

    def pairs() -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}}

    return Parameter(METADATA, "Pairs of the request's metadata, each as `metadata[key]=value`.", pairs)
