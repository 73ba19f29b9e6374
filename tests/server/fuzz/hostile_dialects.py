"""Valid requests of the dialects with every field that they have, to be spoilt."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import data_uri
from tests.server.fuzz.hostile import SCHEMA

EARLIER = "resp_earlier"
"""Stands for the id of a stored response."""
LOOK = {"type": "object", "properties": {"at": {"enum": ["star", "ring"]}}, "required": ["at"]}
IMAGE = {"type": "input_image", "image_url": data_uri(), "detail": "low"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": data_uri().partition(";base64,")[2]}
BLOCK = {"type": "image", "source": SOURCE}

RESPONSES: tuple[dict[str, Any], ...] = (
    {
        "input": "Hello.", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["."], "store": True, "user": "ann",
        "metadata": {"answer_correct": "true"}, "truncation": "auto", "prompt_cache_key": "one", "background": False,
        "service_tier": "auto", "max_tool_calls": 3, "reasoning": {"effort": "low"}, "model": "helmsight-demo@sage",
    },
    {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "Text context: It is red.", "span": "context"}, IMAGE,
                {"type": "input_text", "text": "What color is it?"},
            ]},
        ],
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 3,
        "steering": {"vector": "modality-preference", "toward": "vision", "strength": 0.5},
        "diagnostics": {"include": ["focus", "decay"]}, "baseline": True, "strict": False,
    },
    {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "A list."}], "stream": True,
        "text": {"format": {"type": "json_schema", "name": "l", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        "contrast": {"kind": "icd", "alpha": 0.5}, "strict": False, "stream_options": {"include_obfuscation": False},
    },
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}, IMAGE]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "content": []},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
                {"type": "output_text", "text": "Here.", "annotations": [], "logprobs": []},
            ]},
            {"role": "user", "content": "Sure?"},
        ],
        "sage": {"see": {"alpha": 0.2}, "generate": {"top": 0.2}}, "stream": True, "text": {"format": {"type": "text"}},
        "force": "I see a", "ignore_eos": True, "top_k": 5,
    },
    {"input": "Why?", "previous_response_id": EARLIER, "store": True, "stream": True},
)  # fmt: skip
RESPONSES_WITH_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at":"star"}',
             "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": [
                {"type": "input_text", "text": "Closer:"}, IMAGE,
            ]},
        ],
        "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": LOOK, "strict": True}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
        "parallel_tool_calls": False, "stream": True,
    },
    {
        "input": "Look.", "tools": [{"type": "function", "name": "look", "parameters": LOOK}],
        "tool_choice": {"type": "function", "name": "look"},
    },
)  # fmt: skip
MESSAGES: tuple[dict[str, Any], ...] = (
    {
        "messages": [{"role": "user", "content": "Hello."}], "system": "Be brief.", "temperature": 0.5, "top_p": 0.9,
        "top_k": 5, "seed": 1, "stop_sequences": ["."], "metadata": {"user_id": "ann"}, "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "model": "helmsight-demo@sage",
    },
    {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "Text context: It is red.", "span": "context"}, BLOCK,
                {"type": "text", "text": "What color is it?", "citations": None},
            ]},
        ],
        "steering": {"vector": "modality-preference", "toward": "vision", "strength": 0.5}, "baseline": True,
        "diagnostics": {"include": ["focus", "decay"], "previous_message_id": None}, "strict": False,
    },
    {
        "messages": [{"role": "user", "content": "A list."}], "stream": True, "strict": False,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "contrast": {"kind": "icd", "alpha": 0.5},
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Where?"}, BLOCK]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Here."},
                {"type": "redacted_thinking", "data": "x"},
            ]},
            {"role": "user", "content": "Sure?"},
        ],
        "sage": {"see": {"alpha": 0.2}}, "stream": True, "force": "I see a", "cache_salt": "one",
    },
)  # fmt: skip
MESSAGES_WITH_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "star"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False, "content": [
                    {"type": "text", "text": "Closer:"}, BLOCK,
                ]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "tools": [{"type": "custom", "name": "look", "description": "Looks.", "input_schema": LOOK, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stream": True,
    },
    {
        "messages": [{"role": "user", "content": "Look."}], "tools": [{"name": "look", "input_schema": LOOK}],
        "tool_choice": {"type": "tool", "name": "look"},
    },
)  # fmt: skip
