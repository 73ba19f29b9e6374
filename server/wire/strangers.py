"""Names that this server does not know: one that is nearly a known one is a slip of the pen, one that would change the
answer of another server is refused, and whatever else clients send is ignored, and named in the answer."""

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
"""The ratio of difflib from which a name is taken for a misspelt one."""
MAX_LIKENED = 64
"""Unknown names that are compared with known ones: each takes a moment."""
UNUSED = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"})
"""Fields of OpenAI's that say who asks, or what becomes of an answer elsewhere: frameworks send them by themselves, and they
ask nothing of an answer."""
BESIDE = frozenset({"mode", "models", "store", "truncation", "usage"})
"""Fields that clients send, which do not change an answer, and which are no slips although they look like it."""
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
    "prompt_logprobs": None,
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
"""Fields by which OpenAI, vLLM or other servers of this protocol answer differently, and which this one does not have, with
the value that asks for nothing; null, false and what is empty do neither."""


MOST_NAMED = 64
"""Paths that are named."""
LONGEST_NAME = 64
"""Characters of a name."""

Schema = Mapping[str, Any]


def check_names(given: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, Any] | None = None) -> None:
    """Raise PydanticCustomError for the first name that is not `known` but nearly is, or that stands in `elsewhere` and asks
    for something; null asks for nothing."""
    elsewhere = elsewhere or {}
    longest = 2 * max(map(len, known))
    unknown = [key for key, value in given.items() if key not in known and value is not None]
    for key in unknown:
        if key in elsewhere and not _nothing(given[key], elsewhere[key]):
            raise PydanticCustomError("elsewhere", "not supported", {"key": key})
    beside = BESIDE.union(elsewhere)
    for key in [key for key in unknown if key not in beside and len(key) <= longest][:MAX_LIKENED]:
        if meant := get_close_matches(key.lower(), known, n=1, cutoff=LIKE):
            raise PydanticCustomError("nearly", "unknown", {"key": key, "meant": meant[0]})


def _nothing(value: Any, neutral: Any) -> bool:
    return value is False or value in ("", [], {}) or (neutral is not None and value == neutral)


@dataclass
class KnownNames:
    """What may stand in one place of a body: the names that are known there, all of them where it is `open`; what stands
    under them; what its `items` are. kinds: by the value of "type", where alternatives are told apart by it."""

    open: bool = True
    known: Mapping[str, KnownNames] = field(default_factory=dict)
    items: KnownNames | None = None
    kinds: Mapping[str, KnownNames] = field(default_factory=dict)


def ignored_fields(body: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return the paths of the fields of a body that its model does not know, as `messages[0].name`, `MOST_NAMED` at most;
    null and what is empty ask for nothing. Of those of `ELSEWHERE`, `check_names` lets pass what asks for nothing."""
    found: list[str] = []
    acting = {name: value for name, value in body.items() if name not in UNUSED and name not in ELSEWHERE}
    for path in _unknown(acting, names_of(kind), ()):
        found.append(path_of(path))
        if len(found) == MOST_NAMED:
            break
    return found


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
    """Return the names that the bodies of a model may hold, out of their JSON schema."""
    schema = kind.model_json_schema()
    return _known([schema], schema.get("$defs", {}))


def _known(schemas: Sequence[Schema], defs: Mapping[str, Schema]) -> KnownNames:
    alternatives = [one for schema in schemas for one in _alternatives(schema, defs)]
    items = [one["items"] for one in alternatives if "items" in one]
    inner = _known(items, defs) if items else None
    objects = [one for one in alternatives if one.get("type", "object") == "object"]
    if not objects or any(one.get("additionalProperties", "properties" not in one) for one in objects):
        return KnownNames(items=inner)
    types = [_types(one) for one in objects]
    kinds = (
        {word: _object([one for one in objects if word in _types(one)], defs) for words in types for word in words}
        if len(objects) > 1 and all(types)
        else {}
    )
    return KnownNames(False, _object(objects, defs).known, inner, kinds)


def _object(objects: Sequence[Schema], defs: Mapping[str, Schema]) -> KnownNames:
    under: dict[str, list[Schema]] = {}
    for one in objects:
        for name, schema in one["properties"].items():
            under.setdefault(name, []).append(schema)
    return KnownNames(False, {name: _known(schemas, defs) for name, schemas in under.items()})


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
