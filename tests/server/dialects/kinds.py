"""The sixty requests that are the same in three dialects, as chat completions."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tests.server.conftest import TOLD, data_uri, user

SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["heart", "ring"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
SEEN = [user(data_uri(), "What colour is it?")]
RED, GREEN = (data_uri(Image.new("RGB", (84, 84), colour)) for colour in ((200, 9, 30), (9, 200, 30)))
ELSEWHERE = [
    {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, {"type": "text", "text": "?"}
    ]}
]  # fmt: skip
TWO = [user(GREEN, RED, "Which picture is red?")]
SYSTEM = [{"role": "system", "content": "Be brief."}, user("Why?")]
TURNS = [user(data_uri(), "What is it?"), {"role": "assistant", "content": "A star."}, user("Which colour?")]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["star", "ring"]}}, "required": ["at"]},
    },
}
CALLED = [
    user("Look at the star."),
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"star"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is red."},
]  # fmt: skip

SEEN_LOOKING = [
    *CALLED[:2],
    {"role": "tool", "tool_call_id": "call_1", "content": [
        {"type": "text", "text": "Closer:"}, {"type": "image_url", "image_url": {"url": RED}}
    ]},
]  # fmt: skip
TWICE = [
    *SEEN_LOOKING,
    {"role": "assistant", "content": "I look again.", "tool_calls": [
        {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": '{"at":"ring"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "image_url", "image_url": {"url": GREEN}}]},
]  # fmt: skip
REASONED = [
    user("Which colour?"),
    {"role": "assistant", "content": "Red.", "reasoning_content": "The star looks red."},
    user("Sure?"),
]
REASONED_CALL = [CALLED[0], {**CALLED[1], "reasoning_content": "I need to look."}, CALLED[2]]
TOWARD = {"steering": {"toward": "text", "strength": 2.0}}

BOTH: dict[str, dict[str, Any]] = {
    "text": {"messages": [user("Why?")]},
    "picture": {"messages": SEEN},
    "seeded": {"messages": SEEN, "temperature": 1.3, "top_p": 0.9, "seed": 5},
    "cut": {"messages": SEEN, "max_tokens": 2, "ignore_eos": True},
    "stopped": {"messages": SEEN, "stop": [" with", " help"]},
    "scored": {"messages": SEEN, "logprobs": True, "top_logprobs": 2},
    "schema": {"messages": SEEN, "response_format": JSON, "max_tokens": 40},
    "toward vision": {"messages": TOLD, "steering": {"toward": "vision"}, "diagnostics": True},
    "toward text, beside a baseline": {"messages": TOLD, "steering": {"toward": "text"}, "baseline": True},
    "readouts": {"messages": TWO, "diagnostics": {"include": ["focus", "patches", "decay", "residual"]}},
}
"""Asked whole and streamed."""
WHOLE: dict[str, dict[str, Any]] = {
    "system": {"messages": SYSTEM},
    "context": {"messages": TOLD},
    "seeded, few": {"messages": SYSTEM, "temperature": 1.0, "min_p": 0.05, "seed": 3, "presence_penalty": 0.5},
    "sage": {"messages": SEEN, "sage": True, "strict": False},
    "preset": {"messages": SEEN, "model": "helmsight-demo@text", "diagnostics": {"include": ["focus", "modality"]}},
    "ignored": {"messages": SEEN, "unheard_of": 1},
    "prompt scores": {"messages": SEEN, "prompt_logprobs": 1},
    "guarded": {"messages": TOLD, "guard": {"when": {"mean_logprob": "< 0"}, "then": TOWARD}},
}
STREAMED: dict[str, dict[str, Any]] = {
    "two pictures": {"messages": TWO},
    "turns": {"messages": TURNS},
    "likeliest few": {"messages": SYSTEM, "temperature": 1.0, "top_k": 3, "seed": 9, "repetition_penalty": 1.2},
    "automatic": {"messages": TOLD, "steering": {"toward": "auto"}},
    "contrast": {"messages": SEEN, "contrast": {"kind": "vcd"}},
    "forced": {"messages": SEEN, "force": "The star is red.", "diagnostics": True},
    "never answered twice": {"messages": TOLD, "guard": {"when": {"mean_logprob": "< -9"}, "then": TOWARD}},
}
TOOLS_BOTH: dict[str, dict[str, Any]] = {
    "must call": {"messages": [user("Look.")], "tools": [LOOK], "tool_choice": "required", "max_tokens": 60},
    "saw a picture": {"messages": SEEN_LOOKING, "tools": [LOOK]},
    "reasons": {"messages": SEEN, "force": "<think>It looks red.</think>\n\nIt is red.", "max_tokens": 40},
}
TOOLS_WHOLE: dict[str, dict[str, Any]] = {
    "must call it": {
        "messages": [user("Look.")], "tools": [LOOK], "max_tokens": 60,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "was called": {"messages": CALLED, "tools": [LOOK]},
    "reasoned before": {"messages": REASONED},
    "a call that is cut": {"messages": [user("Look.")], "tools": [LOOK], "tool_choice": "required", "max_tokens": 4},
}  # fmt: skip
TOOLS_STREAMED: dict[str, dict[str, Any]] = {
    "may call": {"messages": [user("Look.")], "tools": [LOOK]},
    "saw two pictures": {"messages": TWICE, "tools": [LOOK]},
    "reasoned before a call": {"messages": REASONED_CALL, "tools": [LOOK]},
    "reasons only": {"messages": SEEN, "force": "<think>It looks red", "max_tokens": 40},
    "one call alone": {"messages": [user("Look.")], "tools": [LOOK], "parallel_tool_calls": False},
}
ERRORS: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown model": ({"messages": SEEN, "model": "other"}, 404, "model_not_found"),
    "a broken picture": ({"messages": [user("data:image/png;base64,AAAA", "?")]}, 400, "invalid_image"),
    "a remote picture": ({"messages": ELSEWHERE}, 400, "remote_images_disabled"),
    "too hot": ({"messages": SEEN, "temperature": 9}, 400, "invalid_value"),
    "an unknown direction": ({"messages": TOLD, "steering": {"toward": "left"}}, 400, "invalid_value"),
    "a typo": ({"messages": SEEN, "steerin": True}, 400, "unknown_parameter"),
    "too long": ({"messages": [user("why " * 2000)]}, 400, "context_length_exceeded"),
    "an unknown vector": ({"messages": SEEN, "steering": {"vector": "nothing"}}, 400, "unknown_vector"),
}
"""Bodies with the status and the code of their error."""
LEFT: dict[str, int] = {"left before the first token": 0, "left after two tokens": 2}
"""Streams that a client leaves after so many pieces of text."""


def kinds(both: dict[str, Any], whole: dict[str, Any], streamed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return requests by name, with `stream`."""
    return {
        **{f"{name}, whole": {**chat, "stream": False} for name, chat in {**both, **whole}.items()},
        **{f"{name}, streamed": {**chat, "stream": True} for name, chat in {**both, **streamed}.items()},
    }


CHATS = kinds(BOTH, WHOLE, STREAMED)
TOOLS = kinds(TOOLS_BOTH, TOOLS_WHOLE, TOOLS_STREAMED)
assert len(CHATS) + len(TOOLS) + len(ERRORS) + len(LEFT) == 60
