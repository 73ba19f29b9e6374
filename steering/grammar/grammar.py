"""Grammars that an answer must match: a JSON schema, a regular expression, or one of several texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher

from steering.errors import RequestError
from steering.grammar.closing import close, nodes_of

MAX_SCHEMA = 65_536
"""The maximum characters of a schema or an expression, well within the stack of `compiled.STACK` bytes."""
MULTIPLES = 100_000
"""The greatest least common multiple of a schema's `multipleOf`, without their powers of ten.

The library compiles an automaton with so many states, some 50 MB and half a second, and has no bound of its own: for
2147483648 it takes a processor, and ever more memory, for ever.
"""
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Options for JSON on one line, with or without blanks: unlimited white space traps small models."""
ASIDE = ' With "strict": false it is left aside.'
"""The advice of a refusal on keywords that a lenient grammar leaves out."""


@dataclass(frozen=True)
class Grammar:
    """A description of the texts that an answer may be.

    text: in llguidance's format. aside: a refusal's advice on how to leave more out, "" where nothing does. param: its name
    in messages. other: the second of two that an answer may follow, which `text` contains.
    """

    text: str
    aside: str = field(default="", compare=False)
    param: str = field(default="grammar", compare=False)
    other: Grammar | None = field(default=None, compare=False)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any], *, strict: bool = True, param: str = "grammar", aside: str = ASIDE
    ) -> Grammar:
        """Return a grammar of one line of JSON that a schema describes.

        Properties come in the schema's order, with no others unless it has keywords about them (see `closing`). If not
        `strict`, keywords that cannot be enforced are ignored, and `oneOf` is read as `anyOf`; `aside` advises that where
        they are refused. Raises RequestError for an invalid schema.
        """
        written = written_schema(schema, strict, param)
        try:
            return cls(LLMatcher.grammar_from_json_schema(written), aside if strict else "", param)
        except ValueError as error:
            raise RequestError(f"'{param}' cannot be read as JSON: {error}.", param=param) from error

    @classmethod
    def json_object(cls, *, param: str = "grammar") -> Grammar:
        """Return a grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """Return a grammar of texts that a regular expression matches from the first character to the last.

        The expression has no look-around and no back-references.
        """
        return cls(LLMatcher.grammar_from_regex(_check_length(pattern, param)), param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "grammar") -> Grammar:
        """Return a grammar of exactly one of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"'{param}' must be a list of texts, none of them empty.", param=param)
        return cls.lark("start: " + " | ".join(map(json.dumps, texts)), param=param)

    @classmethod
    def lark(cls, rules: str, *, param: str = "grammar") -> Grammar:
        """Return a grammar from rules in llguidance's dialect of Lark, beginning with `start`."""
        return cls(LLMatcher.grammar_from_lark(_check_length(rules, param)), param=param)

    @classmethod
    def one_of(cls, rule: str, rules: str, other: Grammar | None, *, param: str = "grammar") -> Grammar:
        """Return a grammar of texts that follow one of some `rules`, or another grammar if there is one."""
        if other is None:
            return cls.lark(f"start: {rule}\n{rules}", param=param)
        own = {"lark_grammar": _check_length(f"start: {rule} | @other\n{rules}", param)}
        (content,) = _parts(other.text)
        return cls(json.dumps({"grammars": [own, {**content, "name": "other"}]}), param=param, other=other)


def unforced(text: str) -> str:
    """Return a grammar's text with which a token is chosen even where only one string can follow.

    llguidance writes such strings with the tokens of the model's tokenizer, which has special ones where they look like
    these; a special token is no text, though.
    """
    first, *others = _parts(text)
    rules = '%llguidance {"no_forcing": true}\nstart: @whole'
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**first, "name": "whole"}, *others]})


def _parts(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    return parts


def written_schema(schema: Mapping[str, Any], strict: bool, param: str) -> str:
    """Return a schema, closed, with its options, as llguidance reads it, also within other grammars."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"'{param}' must be a JSON schema, an object.", param=param)
    if "x-guidance" in schema:
        raise RequestError(f"'{param}.x-guidance' is not supported.", param=param, code="unsupported_value")
    options = {**ONE_LINE, "lenient": not strict, "coerce_one_of": not strict}
    try:
        copied: dict[str, Any] = json.loads(_check_length(json.dumps(schema, allow_nan=False), param))
        _check_multiples(copied, param)
        close(copied)
        for node in nodes_of(copied):
            if node.get("uniqueItems") is False:  # false asserts nothing, but the library refuses the keyword
                del node["uniqueItems"]
        return json.dumps({"x-guidance": options, **copied})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"'{param}' cannot be written as JSON: {error}.", param=param) from error


def _check_multiples(schema: dict[str, Any], param: str) -> None:
    """Raise RequestError where the numbers of `multipleOf` would make too large an automaton."""
    multiples = [node["multipleOf"] for node in nodes_of(schema) if type(node.get("multipleOf")) in (int, float)]
    digits = [int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))) for value in multiples]
    if math.lcm(*digits) > MULTIPLES:
        raise RequestError(
            f"'{param}' cannot be enforced: the least common multiple of all 'multipleOf', apart from powers of ten, may be "
            f"at most {MULTIPLES}.",
            param=param,
            code="unsupported_value",
        )


def _check_length(text: str, param: str) -> str:
    if len(text) > MAX_SCHEMA:
        raise RequestError(f"'{param}' may have at most {MAX_SCHEMA} characters; got {len(text)}.", param=param)
    return text
