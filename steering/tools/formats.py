"""Formats in which models write calls: a table, recognised by the text of their chat templates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from steering.errors import RequestError
from steering.grammar.closing import nodes_of
from steering.grammar.grammar import Grammar, written_schema
from steering.model.mllm import MLLM
from steering.tools.arguments import KEY, VALUE, VALUE_END
from steering.tools.tools import Tools, is_text

MOST_CALLS = 16
"""The maximum number of calls of an answer that must call."""
NAME, ARGUMENTS = "$name", "$arguments"
"""Placeholders of these in a format's call."""
_OBJECT = r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
_SPOKEN_OF = {"type", "title", "description", "default", "examples"}
"""Keys of a plain text's schema that need no enforcing."""
_IN_TAGS = {*_SPOKEN_OF, "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
"""Keys of parameters that tags enforce, or that need no enforcing: no other property is ever written."""


@dataclass(frozen=True)
class Format:
    """A format of calls; a template with all `marks` and none of `others` uses it.

    `start` begins calls and `end` ends them ("": nothing does); `head` matches from there to the arguments, and its group is
    the name. `again` matches the text between two calls of one start; `pairs`: arguments are tags in place of JSON. `call`
    is the text of one call, `before` and `after` are around all, `between` between two. `tags` are kept in an answer's text
    where they are special tokens. `short_ids`: templates want ids of nine letters and digits.
    """

    name: str
    start: str
    end: str
    marks: tuple[str, ...]
    others: tuple[str, ...]
    head: re.Pattern[str]
    call: tuple[str, ...]
    before: tuple[str, ...] = ()
    between: str = "\n"
    after: tuple[str, ...] = ()
    again: re.Pattern[str] | None = None
    pairs: bool = False
    tags: tuple[str, ...] = ()
    short_ids: bool = False

    def grammar(self, tools: Tools, special: Mapping[str, int], otherwise: Grammar | None = None) -> Grammar:
        """Return the grammar of an answer that calls at least one of the tools, or the required one.

        Where there is a grammar for `otherwise`, the answer may follow that instead. Parameters are enforced as
        `Grammar.json_schema` does, leniently where a function is not `strict`. special: ids of tags that are tokens.
        """

        def written(parts: tuple[str, ...], name: str = "", number: int = 0) -> str:
            return " ".join(
                f"arguments_{number}" if part == ARGUMENTS
                else f"<[{special[part]}]>" if part in special
                else json.dumps(part.replace(NAME, name))
                for part in parts
            )  # fmt: skip

        functions = {f"tools[{i}].function": tool["function"] for i, tool in enumerate(tools.functions)}
        if isinstance(tools.required, str):
            functions = {place: each for place, each in functions.items() if each["name"] == tools.required}
        more = f"({json.dumps(self.between)} call){{0,{MOST_CALLS - 1}}}" if tools.parallel else ""
        rules = [f"calls: {written(self.before)} call {more} {written(self.after)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, (place, function) in enumerate(functions.items()):
            rules.append(f"call_{i}: {written(self.call, function['name'], i)}")
            schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
            strict = bool(function.get("strict"))
            arguments = _pairs(schema, strict) if self.pairs else f"%json {written_schema(schema, strict, 'tools')}"
            if self.pairs:
                _check_writable(schema, f"{place}.parameters", self.end)
            rules.append(f"arguments_{i}: {arguments}")
        if self.pairs:
            # With its end in one lexeme: lexemes are greedy, and one of the text alone would read on into its end.
            rules.append(f"text[suffix={json.dumps(VALUE_END)}]: /(?s:.*)/")
        return Grammar.one_of("calls", "\n".join(rules), otherwise, param="tools")


def _pairs(schema: dict[str, Any], strict: bool) -> str:
    """Return a rule for arguments in tags: the named properties in order, the optional ones with or without."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(n, str) for n in required)
    ):
        raise RequestError("'tools': parameters need 'properties', an object, and 'required', a list.", param="tools")
    if strict and (beyond := schema.keys() - _IN_TAGS):
        raise _unenforced(f"{min(beyond)} of parameters that are written in tags")
    properties = {**properties, **{name: {} for name in required if name not in properties}}
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    rules = []
    for name, member in properties.items():
        if not is_text(member):
            value = f"%json {written_schema({**shared, **member} if isinstance(member, dict) else {}, strict, 'tools')}"
            value += f" {json.dumps(VALUE_END)}"
        elif texts := member.get("enum") or ([member["const"]] if "const" in member else []):
            value = "(" + " | ".join(json.dumps(text + VALUE_END) for text in texts) + ")"
        elif strict and (beyond := member.keys() - _SPOKEN_OF):
            raise _unenforced(f"{min(beyond)} of {name!r}, a text that is written in tags")
        else:
            value = "text"
        pair = f"{json.dumps(f'{KEY[0]}{name}{KEY[1]}{chr(10)}{VALUE}')} {value} {json.dumps(chr(10))}"
        rules.append(pair if name in required else f"({pair})?")
    return " ".join(rules) or '""'


def _check_writable(schema: dict[str, Any], at: str, end: str) -> None:
    """Raise RequestError for names and values within which tags would end, or that change where they are read."""
    for key in ("properties", "required"):
        for name in schema.get(key) or ():
            if name != name.strip() or KEY[1] in name or end in name:
                raise _unwritable(f"{at}.{key}", f"the name {name!r} has outer white space, {KEY[1]} or {end}")
    for path in ("properties", "$defs", "definitions"):
        members = schema.get(path)
        for name, member in members.items() if isinstance(members, dict) else ():
            for node in nodes_of(member):
                held = next(
                    (key for key in ("enum", "const", "properties") if VALUE_END in _constants(node, key)), None
                )
                if held is not None:
                    raise _unwritable(f"{at}.{path}.{name}{f'.{held}' * (node is member)}", f"{held} has {VALUE_END}")


def _constants(node: dict[str, Any], key: str) -> str:
    """Return what a schema has in answers as it is: values, or the names of properties."""
    value = node.get(key)
    return json.dumps([*value] if key == "properties" and isinstance(value, dict) else value)


def _unwritable(place: str, why: str) -> RequestError:
    message = f"'{place}' cannot be written in this model's tags: {why}."
    return RequestError(message, param=place, code="unsupported_value")


def _unenforced(what: str) -> RequestError:
    return RequestError(f"'tools' cannot be enforced: {what}.", param="tools", code="unsupported_value")


HERMES = Format(
    "hermes",
    start="<tool_call>",
    end="</tool_call>",
    marks=("<tool_call>", "</tool_call>", "arguments"),
    others=("<function=", "<arg_key>", "<tool_sep>"),
    head=re.compile(_OBJECT),
    call=("<tool_call>", f'\n{{"name": "{NAME}", "arguments": ', ARGUMENTS, "}\n", "</tool_call>"),
    tags=("<tool_call>", "</tool_call>"),
)
"""The format of Hermes 2 and of Qwen 2.5 and 3, language models and those with pictures."""
GLM = Format(
    "glm",
    start="<tool_call>",
    end="</tool_call>",
    marks=("<tool_call>", "</tool_call>", KEY[0], VALUE),
    others=("<function=", "<tool_sep>"),
    head=re.compile(r"\s*([\w.-]+)\s*(?=<)"),
    call=("<tool_call>", f"{NAME}\n", ARGUMENTS, "</tool_call>"),
    pairs=True,
    tags=("<tool_call>", "</tool_call>"),
)
"""The format of GLM 4.5, 4.6 and 4.7 and GLM-4.5V: texts are written plainly, everything else as JSON."""
MISTRAL = Format(
    "mistral",
    start="[TOOL_CALLS]",
    end="]",
    marks=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    others=("[ARGS]",),
    head=re.compile(r"\s*\[?" + _OBJECT),
    call=(f'{{"name": "{NAME}", "arguments": ', ARGUMENTS, "}"),
    before=("[TOOL_CALLS]", " ["),
    between=", ",
    after=("]",),
    again=re.compile(r"[^{\]]*\}\s*,\s*(?=\{)"),
    tags=("[TOOL_CALLS]",),
    short_ids=True,
)
"""The format of Mistral's tokenizers before version 11, such as Nemo's: one list of objects."""
MINISTRAL = Format(
    "ministral",
    start="[TOOL_CALLS]",
    end="",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    others=(),
    head=re.compile(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)"),
    call=("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS),
    between="",
    tags=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    short_ids=True,
)
"""The format of Mistral's tokenizers from version 11 on, as of Mistral Small 3.2, Ministral 3 and Magistral."""
FORMATS = (HERMES, GLM, MISTRAL, MINISTRAL)


@cache
def _format(template: str) -> Format | None:
    for form in FORMATS:
        if all(mark in template for mark in form.marks) and not any(
            mark_of_other in template for mark_of_other in form.others
        ):
            return form
    return None


def format_of(mllm: MLLM) -> Format | None:
    """Return a model's format of calls, None where its chat template has no tools, or an unknown format."""
    return _format(mllm.template) if "tools" in mllm.template else None


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with ids of calls made of nine letters and digits, equal for equal ids."""

    def short(name: Any) -> str:
        name = name if isinstance(name, str) else ""
        return name if re.fullmatch("[A-Za-z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]

    out = []
    for message in messages:
        beside: dict[str, Any] = (
            {"tool_call_id": short(message.get("tool_call_id"))} if message["role"] == "tool" else {}
        )
        if calls := message.get("tool_calls"):
            beside["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in calls]
        out.append({**message, **beside})
    return out


def special_tags(mllm: MLLM, form: Format) -> dict[str, int]:
    """Return the ids of a format's tags that are special tokens, and so would be left out of an answer's text."""
    special = [tag for tag in form.tags if mllm.special_pattern.fullmatch(tag)]
    return {tag: mllm.tokenizer.convert_tokens_to_ids(tag) for tag in special}
