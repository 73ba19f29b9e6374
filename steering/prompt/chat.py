"""Chats as requests give them, and copies of them without pictures or text contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

GRAY = (128, 128, 128)
CONTEXT_LINE = "Text context:"
"""The prefix of a line of user text that is a text context (modality-preference paper, prompt of section 3)."""


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    """Return the images of a chat, in order."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return [part["image"] for part in parts if part["type"] == "image"]


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat without its pictures."""
    return [
        dict(message)
        if isinstance(message["content"], str)
        else {**message, "content": [part for part in message["content"] if part["type"] == "text"] or ""}
        for message in messages
    ]


def blanked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with gray pictures of the same sizes in place of its own."""

    def blank(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**part, "image": Image.new("RGB", part["image"].size, GRAY)} if part["type"] == "image" else part

    return [
        dict(message)
        if isinstance(message["content"], str)
        else {**message, "content": [blank(part) for part in message["content"]]}
        for message in messages
    ]


def without_context(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat without its users' text contexts: parts of that span and lines that begin with `CONTEXT_LINE`."""

    def rest(text: str) -> str:
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(CONTEXT_LINE))

    out = []
    for message in messages:
        content = message["content"]
        if message["role"] == "user" and isinstance(content, str):
            content = rest(content)
        elif message["role"] == "user":
            kept = (part for part in content if part.get("span") != "context")
            content = [{**part, "text": rest(part["text"])} if part["type"] == "text" else part for part in kept]
        out.append({**message, "content": content})
    return out


def contexts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the users' text contexts in order, as `without_context` removes them, without the lines' prefix."""
    found = []
    for message in messages:
        if message["role"] != "user":
            continue
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("span") == "context":
                found.append(part["text"])
            elif part["type"] == "text":
                found += [line for line in part["text"].splitlines() if line.startswith(CONTEXT_LINE)]
    return [said for context in found if (said := context.strip().removeprefix(CONTEXT_LINE).strip())]
