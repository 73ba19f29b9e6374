"""Names that this server does not know.

A name similar to a known one is refused as a typo, a field that would change the answer of another server is refused as
unsupported, and everything else is ignored and listed in the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from steering.protocol.wording import path_of

LIKE = 0.7
"""Similarity ratio of difflib from which a name counts as misspelt."""
MAX_LIKENED = 64
"""Largest number of unknown names that are compared with known ones, since each comparison takes time."""
UNUSED = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"})
"""OpenAI's fields on the caller, which frameworks send by default and which do not affect answers."""
BESIDE = frozenset({"mode", "models", "truncation", "usage"})
"""Fields that clients send, that do not change an answer, and that are no typos although they look like one."""
ELSEWHERE: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": None,
    "best_of": 1,
    "chat_template": None,
    "documents": None,
    "early_stopping": None,
    "echo": None,
    "extra_body": None,
    "grammar": None,
    "guided_choice": None,
    "guided_decoding_backend": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "include_stop_str_in_output": None,
    "length_penalty": 1,
    "logits_processors": None,
    "max_input_tokens": None,
    "max_length": None,
    "min_length": 0,
    "mirostat": 0,
    "options": None,
    "random_seed": None,
    "safe_prompt": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_regex": None,
    "stop_sequences": None,
    "stop_token_ids": None,
    "structural_tag": None,
    "suffix": None,
    "system": None,
    "template": None,
    "top_a": 0,
    "truncate_prompt_tokens": None,
    "typical_p": 1,
    "use_beam_search": None,
    "web_search_options": None,
}
"""Fields that change the answers of OpenAI, vLLM or similar servers and that this one lacks.

Each has the value that requests nothing; null, false and empty values request nothing either.
"""


MOST_NAMED = 64
"""Largest number of listed paths."""
LONGEST_NAME = 64
"""Largest number of characters of a listed name."""

Schema = Mapping[str, Any]


def check_names(values: Mapping[str, Any], names: Collection[str], elsewhere: Mapping[str, Any] | None = None) -> None:
    """Raise PydanticCustomError for the first name similar to one of `names`, or in `elsewhere` with an effect.

    Null has no effect.
    """
    elsewhere = elsewhere or {}
    longest = 2 * max(map(len, names))
    unknown = [key for key, value in values.items() if key not in names and value is not None]
    for key in unknown:
        if key in elsewhere and not _nothing(values[key], elsewhere[key]):
            raise PydanticCustomError("elsewhere", "not supported", {"key": key})
    beside = BESIDE.union(elsewhere)
    for key in [key for key in unknown if key not in beside and len(key) <= longest][:MAX_LIKENED]:
        if meant := get_close_matches(key.lower(), names, n=1, cutoff=LIKE):
            raise PydanticCustomError("nearly", "unknown", {"key": key, "meant": meant[0]})


def _nothing(value: Any, neutral: Any) -> bool:
    return value is False or value in ("", [], {}) or (neutral is not None and value == neutral)


@dataclass
class KnownNames:
    """The names that one place of a body may hold.

    `known` holds them, with the names below each; any other is allowed too if it is `open`. `items` describes the items of a
    list. `kinds` holds alternatives by their value of "type".
    """

    open: bool = True
    known: Mapping[str, KnownNames] = field(default_factory=dict)
    items: KnownNames | None = None
    kinds: Mapping[str, KnownNames] = field(default_factory=dict)


def ignored_fields(body: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return the paths of the fields of a body that its model does not know, as `messages[0].name`.

    At most `MOST_NAMED` are returned. Null and empty values are not listed, nor are the fields of `ELSEWHERE` that
    `check_names` accepts.
    """
    paths: list[str] = []
    acting = {name: value for name, value in body.items() if name not in UNUSED and name not in ELSEWHERE}
    for path in _unknown(acting, names_of(kind), ()):
        paths.append(path_of(path))
        if len(paths) == MOST_NAMED:
            break
    return paths


def _unknown(value: Any, names: KnownNames, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, list) and names.items is not None:
        for i, item in enumerate(value):
            if isinstance(item, dict | list):
                yield from _unknown(item, names.items, (*path, i))
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    names = names.kinds.get(kind, names) if isinstance(kind, str) else names
    if names.open:
        return
    for name, item in value.items():
        if (inner := names.known.get(name)) is not None:
            if isinstance(item, dict | list):
                yield from _unknown(item, inner, (*path, name))
        elif item not in (None, "", [], {}):
            yield (*path, name[:LONGEST_NAME])


@lru_cache(maxsize=16)
def names_of(kind: type[BaseModel]) -> KnownNames:
    """Return the names that the bodies of a model may hold, from their JSON schema."""
    schema = kind.model_json_schema()
    return _known_names([schema], schema.get("$defs", {}))


def _known_names(schemas: Sequence[Schema], defs: Mapping[str, Schema]) -> KnownNames:
    alternatives = [alternative for schema in schemas for alternative in _alternatives(schema, defs)]
    items = [alternative["items"] for alternative in alternatives if "items" in alternative]
    inner = _known_names(items, defs) if items else None
    objects = [alternative for alternative in alternatives if alternative.get("type", "object") == "object"]
    if not objects or any(schema.get("additionalProperties", "properties" not in schema) for schema in objects):
        return KnownNames(items=inner)
    types = [_types(schema) for schema in objects]
    kinds = (
        {
            word: _object([schema for schema in objects if word in _types(schema)], defs)
            for words in types
            for word in words
        }
        if len(objects) > 1 and all(types)
        else {}
    )
    return KnownNames(False, _object(objects, defs).known, inner, kinds)


def _object(objects: Sequence[Schema], defs: Mapping[str, Schema]) -> KnownNames:
    under: dict[str, list[Schema]] = {}
    for alternative in objects:
        for name, schema in alternative["properties"].items():
            under.setdefault(name, []).append(schema)
    return KnownNames(False, {name: _known_names(schemas, defs) for name, schemas in under.items()})


def _alternatives(schema: Schema, defs: Mapping[str, Schema]) -> list[Schema]:
    """Return the alternative schemas of a value, with references resolved."""
    if "$ref" in schema:
        return _alternatives(defs[schema["$ref"].rpartition("/")[2]], defs)
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return [alternative for part in several for alternative in _alternatives(part, defs)] if several else [schema]


def _types(schema: Schema) -> Sequence[str]:
    """Return the allowed values of "type", empty if any is allowed."""
    stated = schema["properties"].get("type", {})
    return [stated["const"]] if "const" in stated else stated.get("enum", [])
