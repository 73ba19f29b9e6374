"""Validation of a request's messages: errors name the wrong place, and image files are opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from PIL import Image
from pydantic_core import from_json

from steering.errors import RequestError
from steering.pictures import opened
from steering.protocol.wording import is_whole, must, shown

ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "image")


def chat_of(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Return the chat with its images opened: each given as a PIL image, a file's path, or a file's bytes.

    Raises RequestError naming the wrong place, such as `messages[0].content[1].image`.
    """
    if not _is_list(messages):
        raise must("messages", "be a list of messages, each {'role': ..., 'content': ...}", messages)
    chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return messages if all(opened is other for opened, other in zip(chat, messages, strict=True)) else chat


def _message(message: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise must(place, "be a dict {'role': ..., 'content': ...}", message)
    if (role := message.get("role")) not in ROLES:
        raise must(f"{place}.role", f"be one of {', '.join(ROLES)}", role)
    content = message.get("content")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and (role != "assistant" or not isinstance(reasoning, str)):
        raise must(f"{place}.reasoning_content", "be a string, in a message of the assistant", reasoning)
    if message.get("tool_calls"):
        if role != "assistant":
            raise must(f"{place}.tool_calls", "stand in a message of the assistant", message["tool_calls"])
        calls = _calls(message["tool_calls"], f"{place}.tool_calls")
        message = {**message, "tool_calls": calls, "content": content or ""}
        content = message["content"]
    if isinstance(content, str):
        return message
    if not _is_list(content):
        raise must(f"{place}.content", "be a string or a list of parts", content)
    parts = [_part(part, f"{place}.content[{i}]") for i, part in enumerate(content)]
    return (
        message
        if all(opened is other for opened, other in zip(parts, content, strict=True))
        else {**message, "content": parts}
    )


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls as chat templates take them, with their arguments as objects."""
    if not _is_list(calls):
        raise must(place, "be a list of calls", calls)
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        at = f"{place}[{i}].function"
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise must(at, "be a dict {'name': ..., 'arguments': ...}", function)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments)  # rejects excessive nesting and lone surrogates
            except ValueError:
                arguments = None
        if not isinstance(arguments, Mapping):
            raise must(f"{at}.arguments", "be a JSON object", function["arguments"])
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        parsed.append({**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return parsed


def _part(part: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise must(place, "be a dict {'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}", part)
    if (kind := part.get("type")) not in PARTS:
        raise must(f"{place}.type", f"be one of {', '.join(PARTS)}", kind)
    if kind == "image":
        _check_pixels(part, place)
        image = part.get("image")
        return part if isinstance(image, Image.Image) else {**part, "image": _picture(image, f"{place}.image")}
    if not isinstance(part.get("text"), str):
        raise must(f"{place}.text", "be a string", part.get("text"))
    if part.get("span") not in (None, "context"):
        raise must(f"{place}.span", "be 'context', or not there", part["span"])
    return part


def _check_pixels(part: Mapping[str, Any], place: str) -> None:
    least, most = part.get("min_pixels"), part.get("max_pixels")
    for name, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and not (is_whole(value) and value > 0):
            raise must(f"{place}.{name}", "be a whole number above 0", value)
    if least is not None and most is not None and least > most:
        raise must(f"{place}.min_pixels", f"be at most max_pixels, which is {most}", least)


def _picture(source: Any, place: str) -> Image.Image:
    url = isinstance(source, str) and source.lower().startswith(("data:", "http:", "https:"))
    if url or not isinstance(source, str | Path | bytes):
        raise must(place, "be a PIL image, the path of a file or its bytes", source)
    try:
        return opened(source)
    except OSError as error:
        raise _refused(place, f"cannot be opened ({error.strerror or error})", source) from error
    except ValueError as error:
        raise _refused(place, "is not a readable image", source) from error


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _refused(place: str, why: str, source: str | Path | bytes) -> RequestError:
    what = f"what these {len(source)} bytes hold" if isinstance(source, bytes) else f"the file {shown(str(source))}"
    return RequestError(f"'{place}': {what} {why}.", param=place, code="invalid_image")
