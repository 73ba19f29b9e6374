"""Chats as requests give them, and copies of them without pictures or text contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL import Image

GRAY = (128, 128, 128)
CONTEXT_LINE = "Text context:"
"""The prefix of a line that is a text context (modality-preference paper, prompt of section 3)."""
CONTEXT_ROLES = ("system", "user", "tool")
"""The roles in whose messages such a line counts.

An assistant's words are the model's own, so in its messages only a marked part is a context.
"""


def is_context_line(role: str, line: str) -> bool:
    """Return whether a line of a message of this role is a text context."""
    return role in CONTEXT_ROLES and line.startswith(CONTEXT_LINE)


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of a chat that are images, in order."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return [part for part in parts if part["type"] == "image"]


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    """Return the images of a chat, in order."""
    return [part["image"] for part in image_parts(messages)]


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
    """Return the chat without its text contexts: parts of that span, and lines that begin with `CONTEXT_LINE`.

    A system message that held nothing else is left out; other messages stay, because their turns count.
    """
    out = []
    for message in messages:
        role, content = message["role"], message["content"]
        remaining: Any
        if isinstance(content, str):
            remaining = _without_lines(role, content)
        else:
            parts = (part for part in content if part.get("span") != "context")
            remaining = [
                {**part, "text": _without_lines(role, part["text"])} if part["type"] == "text" else part
                for part in parts
            ]
        if role != "user" and not remaining:
            remaining = ""
        if role != "system" or remaining or not content:
            out.append({**message, "content": remaining})
    return out


def _without_lines(role: str, text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not is_context_line(role, line))


def context_parts(texts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the text contexts among a system message's parts: those of that span, and lines that are contexts."""
    out = []
    for part in texts:
        if part.get("span") == "context":
            out.append(dict(part))
        elif part["type"] == "text":
            lines = [line for line in part["text"].splitlines(keepends=True) if is_context_line("system", line)]
            if lines:
                out.append({**part, "text": "".join(["\n", *lines])})
    return out


def contexts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the text contexts in order, as `without_context` removes them, without the lines' prefix."""
    contexts = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("span") == "context":
                contexts.append(part["text"])
            elif part["type"] == "text":
                contexts += [line for line in part["text"].splitlines() if is_context_line(message["role"], line)]
    return [text for context in contexts if (text := context.strip().removeprefix(CONTEXT_LINE).strip())]
