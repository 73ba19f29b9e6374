"""How models write calls: a table of what their chat templates tell them, recognised by the template's own text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from steering.grammar.grammar import Grammar, written_schema
from steering.model.mllm import MLLM
from steering.tools.tools import Tools

MOST_CALLS = 16
"""Calls of one answer that must call."""


@dataclass(frozen=True)
class Format:
    """One way of writing calls: each an object of `name` and `arguments` between `start` and `end`. A template that has all
    `marks` and none of `others` writes them so."""

    name: str
    start: str
    end: str
    marks: tuple[str, ...]
    others: tuple[str, ...] = ()

    def grammar(self, tools: Tools) -> Grammar:
        """What an answer must be that calls one of the tools at least, or the required one. Parameters are enforced as
        `Grammar.json_schema` does, leniently where a function is not `strict`."""
        wanted = [tool["function"] for tool in tools.functions if tools.required in (True, tool["function"]["name"])]
        more = f'("\\n" call){{0,{MOST_CALLS - 1}}}' if tools.parallel else ""
        rules = [f"start: call {more}", "call: " + " | ".join(f"call_{i}" for i in range(len(wanted)))]
        for i, function in enumerate(wanted):
            head = f'{self.start}\n{{"name": {json.dumps(function["name"])}, "arguments": '
            rules.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + chr(10) + self.end)}")
            schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
            rules.append(f"arguments_{i}: %json {written_schema(schema, bool(function.get('strict')), 'tools')}")
        return Grammar.lark("\n".join(rules), param="tools")


HERMES = Format(
    "hermes",
    start="<tool_call>",
    end="</tool_call>",
    marks=("<tool_call>", "</tool_call>", "arguments"),
    others=("<function=", "<arg_key>"),
)
"""Of Hermes 2 and of Qwen 2.5 and 3, language models and those with pictures."""
FORMATS = (HERMES,)


def format_of(mllm: MLLM) -> Format | None:
    """How a model writes calls, None where its chat template has no tools, or ones of a format that is not known here."""
    template: Any = getattr(mllm.processor, "chat_template", None) or getattr(mllm.tokenizer, "chat_template", None)
    if not isinstance(template, str) or "tools" not in template:
        return None
    for form in FORMATS:
        known = all(mark in template for mark in form.marks) and not any(other in template for other in form.others)
        # What a tokenizer takes for a special token is left out of an answer's text.
        if known and not mllm.special_pattern.search(form.start + form.end):
            return form
    return None
