"""The protocols in which a server is asked: chat completions, and the same chats as responses and as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    path: its route, behind the server's URL. body: returns the body that means the same as a chat completion. has_text:
    returns True for an event with new text. usage: returns the usage that an event or a whole answer holds.
    """

    path: str
    body: Callable[[Body], Body]
    has_text: Callable[[Mapping[str, Any]], bool]
    usage: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
    tokens: str


def _response(chat: Body) -> Body:
    body = {name: value for name, value in chat.items() if name not in ("messages", "max_tokens", "stream_options")}
    messages = [{**message, "content": _parts(message["content"], _input)} for message in chat["messages"]]
    return {**body, "input": messages, "max_output_tokens": chat["max_tokens"]}


def _input(part: Body) -> Body:
    if part["type"] == "text":
        return {**part, "type": "input_text"}
    return {"type": "input_image", "image_url": part["image_url"]["url"]}


def _message(chat: Body) -> Body:
    body = {name: value for name, value in chat.items() if name not in ("messages", "stream_options")}
    systems = [message["content"] for message in chat["messages"] if message["role"] == "system"]
    system = {"system": systems[0]} if systems else {}
    turns = [
        {**message, "content": _parts(message["content"], _block)}
        for message in chat["messages"]
        if message["role"] != "system"
    ]
    return {**body, **system, "messages": turns}


def _block(part: Body) -> Body:
    if part["type"] == "text":
        return part
    kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _parts(content: Any, translate: Callable[[Body], Body]) -> Any:
    return content if isinstance(content, str) else [translate(part) for part in content]


def _chat_text(event: Mapping[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in event["choices"])


PROTOCOLS = {
    "chat": Protocol(
        "/chat/completions", lambda chat: chat, _chat_text, lambda event: event.get("usage"), "completion_tokens"
    ),
    "responses": Protocol(
        "/responses", _response, lambda event: event["type"] == "response.output_text.delta",
        lambda event: event.get("usage") or (event.get("response") or {}).get("usage"), "output_tokens",
    ),
    "messages": Protocol(
        "/messages", _message,
        lambda event: event["type"] == "content_block_delta" and bool(event["delta"].get("text")),
        lambda event: event.get("usage"), "output_tokens",
    ),
}  # fmt: skip
