"""What an answer must be: what a JSON schema describes, what a regular expression matches, one of several texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from steering.errors import RequestError
from steering.grammar.closing import close, nodes_of

MAX_SCHEMA = 65_536
"""Characters of a schema or an expression: what is compiled on a stack of `compiled.STACK` bytes, with room to spare."""
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON of one line, with or without blanks: where white space may go on, a small model writes nothing else."""


@dataclass(frozen=True)
class Grammar:
    """Which texts an answer may be.

    text: as llguidance reads it. strict: that a lenient one would leave more aside. param: what messages call it.
    """

    text: str
    strict: bool = field(default=False, compare=False)
    param: str = field(default="grammar", compare=False)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, strict: bool = True, param: str = "grammar") -> Grammar:
        """One line of JSON that a schema describes, its properties in the schema's order, and no others unless it says
        something of them (see `closing`). Where it is not `strict`, keywords
        that cannot be enforced are left aside, and `oneOf` is read as `anyOf`. Raises RequestError for what is no schema.
        """
        written = written_schema(schema, strict, param)
        try:
            return cls(LLMatcher.grammar_from_json_schema(written), strict, param)
        except ValueError as error:
            raise RequestError(f"'{param}' cannot be read as JSON: {error}.", param=param) from error

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """What a regular expression matches from its first character to its last; it has no look-around and no references
        back.
        """
        return cls(LLMatcher.grammar_from_regex(_short(pattern, param)), param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"'{param}' must be a list of texts, none of them empty.", param=param)
        return cls.lark("start: " + " | ".join(map(json.dumps, texts)), param=param)

    @classmethod
    def lark(cls, rules: str, *, param: str = "grammar") -> Grammar:
        """What rules in llguidance's dialect of Lark describe, beginning with `start`."""
        return cls(LLMatcher.grammar_from_lark(_short(rules, param)), param=param)


def written_schema(schema: Mapping[str, Any], strict: bool, param: str) -> str:
    """A schema, closed, with how it is to be enforced, as llguidance reads it, also within other grammars."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"'{param}' must be a JSON schema, an object.", param=param)
    if "x-guidance" in schema:
        raise RequestError(f"'{param}.x-guidance' is not supported.", param=param, code="unsupported_value")
    options = {**ONE_LINE, "lenient": not strict, "coerce_one_of": not strict}
    try:
        copied: dict[str, Any] = json.loads(_short(json.dumps(schema, allow_nan=False), param))
        close(copied)
        for node in nodes_of(copied):
            if node.get("uniqueItems") is False:  # asserts nothing, and would be refused as what does
                del node["uniqueItems"]
        return json.dumps({"x-guidance": options, **copied})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"'{param}' cannot be written as JSON: {error}.", param=param) from error


def _short(text: str, param: str) -> str:
    if len(text) > MAX_SCHEMA:
        raise RequestError(f"'{param}' may have at most {MAX_SCHEMA} characters; got {len(text)}.", param=param)
    return text
