"""Chains of stored responses: a response that continues another one is asked with the whole chat again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.dialects.reading import REASONING

INSTRUCTIONS = "instructions"
"""The mark of a stored system message that came from `instructions`, which a continuation does not inherit."""


def chat_of(messages: str, response: str, url_of: Callable[[str], str], reasoned: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a chat that continues a stored response, in the form of a chat completion.

    messages: of its request, and `response` itself, as JSON. url_of: returns the URL of an image that was kept. reasoned:
    the chat includes the reasoning of its answers.
    """
    chat = [_message(message, url_of) for message in json.loads(messages) if not message.get(INSTRUCTIONS)]
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning = []
    for item in json.loads(response)["output"]:
        if item["type"] == "reasoning":
            reasoning += [part["text"] for part in item["content"]]
        elif item["type"] == "message":
            answer["content"] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            answer.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
    if reasoning:
        answer[REASONING] = "\n".join(reasoning)
    if not reasoned:
        return [{name: value for name, value in message.items() if name != REASONING} for message in [*chat, answer]]
    return [*chat, answer]


def _message(message: Mapping[str, Any], url_of: Callable[[str], str]) -> dict[str, Any]:
    chat = {name: message[name] for name in ("role", "tool_calls", "tool_call_id", REASONING) if message.get(name)}
    parts = message["content_parts"]
    if parts is None:
        return {**chat, "content": message["content"]}
    return {**chat, "content": [_part(part, url_of) for part in parts]}


def _part(part: Mapping[str, Any], url_of: Callable[[str], str]) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    return {**part, "image_url": {**part["image_url"], "url": url_of(part["image_url"]["url"])}}


def items_of(identity: str, messages: str, image: Callable[[str], str | None]) -> list[dict[str, Any]]:
    """Return the input items of a stored response; `image` returns the URL to show for one, None for none."""
    items: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        items.append({"id": f"{kind}_{identity}_{len(items)}", "status": "completed", **fields})

    for message in json.loads(messages):
        if message.get(INSTRUCTIONS):
            continue
        parts = message["content_parts"] or [{"type": "text", "text": message["content"]}]
        shown = [_shown(part, message["role"], image) for part in parts]
        if message["role"] == "tool":
            output = message["content"] if message["content_parts"] is None else shown
            add("fco", type="function_call_output", call_id=message.get("tool_call_id") or "", output=output)
            continue
        if message.get(REASONING):
            add("rs", type="reasoning", summary=[], content=[{"type": "reasoning_text", "text": message[REASONING]}])
        if message["content"] or message["content_parts"]:
            add("msg", type="message", role=message["role"], content=shown)
        for call in message.get("tool_calls") or ():
            named = {"call_id": call.get("id") or "", **call["function"]}
            add("fc", type="function_call", **named)
    return items


def _shown(part: Mapping[str, Any], role: str, image: Callable[[str], str | None]) -> dict[str, Any]:
    if part["type"] != "text":
        return {"type": "input_image", "detail": "auto", "image_url": image(part["image_url"]["url"])}
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}
