"""Chats with Helmsight's server: their fields by name, and long ones by number."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import data_uri

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["top", "bottom"]}, "closely": {"type": "boolean"}, "times": {"enum": [1, 2, 3]}},
    "required": ["at", "closely", "times"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": LOOK, "strict": True}},
    {"type": "function", "function": {"name": "count"}},
]
STEERED = {"vector": "modality-preference", "toward": "text", "strength": 0.5}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "look", "schema": LOOK, "strict": True}}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "read": {"diagnostics": {"include": ["focus", "modality", "decay"]}, "logprobs": True, "top_logprobs": 2},
    "steered, beside a baseline": {"steering": STEERED, "baseline": True, "diagnostics": {"include": ["focus"]}},
    "a schema": {"response_format": SCHEMA, "max_tokens": 80},
    "a schema, steered": {"response_format": SCHEMA, "steering": STEERED, "max_tokens": 80},
    "a schema, contrasted": {"response_format": SCHEMA, "contrast": {"kind": "icd"}, "max_tokens": 80},
    "a named tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    "some tool": {"tools": TOOLS, "tool_choice": "required"},
    "tools, if it likes": {"tools": TOOLS, "tool_choice": "auto"},
    "vcd, twice": {"contrast": {"kind": "vcd"}, "n": 2},
    "sage but see": {"sage": {"think": True, "generate": {"refresh": 3}, "see": False}},
}
"""Fields of requests by name."""


def numbered(number: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the parts and fields of a long chat: each begins otherwise, and so has another home among servers."""
    name = ("plain", "steered, beside a baseline", "a schema", "sage but see")[number % 4]
    fields = {**ASKED[name], "max_tokens": 80, "ignore_eos": "schema" not in name}
    return (data_uri(), f"{number}: What is at the top?"), fields
