"""Reading bodies of other dialects: the chat request is put together, and each part of it knows its place in the body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from server.dialects.dialect import Translation
from server.errors import BadRequest

Content = str | list[dict[str, Any]]
REASONING = "reasoning_content"
"""The field of an assistant's message for its reasoning, as Qwen3's chat template names it."""


class Chat:
    """A chat request that is put together from a body in another dialect."""

    def __init__(self, fields: dict[str, Any]):
        self.fields = fields
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {"messages": "input"}
        self.ignored: list[str] = []
        self.truncates = False
        self._reasoning: list[tuple[str, str]] = []
        """Texts of reasoning, each with its place, whose answer has not come yet."""

    def set(self, name: str, value: Any, place: str) -> None:
        """Set a field that has another place in the body."""
        self.fields[name] = value
        self.places[name] = place

    def add(self, role: str, content: Content, place: str, content_place: str | None = None) -> None:
        """Add a message."""
        if role != "assistant":
            self._forget_reasoning()
        self.messages.append({"role": role, "content": content})
        here = f"messages[{len(self.messages) - 1}]"
        self._attach_reasoning()
        self.places[here] = place
        if isinstance(content, str) or content_place is not None:
            self.places[f"{here}.content"] = content_place or place

    def call(self, identity: str, name: str, arguments: str, place: str) -> None:
        """Add a call of a function, to the assistant's message before it if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "", place)
        self._attach_reasoning()
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
        self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls) - 1}]"] = place

    def result(self, identity: str, content: Content, place: str, content_place: str) -> None:
        """Add the result of a call."""
        self.add("tool", content, place, content_place)
        self.messages[-1]["tool_call_id"] = identity

    def reason(self, text: str, place: str) -> None:
        """Add reasoning to the next message or call of the assistant; it is ignored if another's message comes first."""
        if text:
            self._reasoning.append((text, place))
        else:
            self.ignored.append(place)

    def _attach_reasoning(self) -> None:
        """Give the last message, which is the assistant's, the reasoning before it."""
        if not self._reasoning:
            return
        message, here = self.messages[-1], f"messages[{len(self.messages) - 1}].{REASONING}"
        texts = [*([message[REASONING]] if REASONING in message else []), *(text for text, _ in self._reasoning)]
        message[REASONING] = "\n".join(texts)
        self.places.setdefault(here, self._reasoning[0][1])
        self._reasoning.clear()

    def _forget_reasoning(self) -> None:
        self.ignored += [place for _, place in self._reasoning]
        self._reasoning.clear()

    def translated(self) -> Translation:
        """Return the chat request."""
        self._forget_reasoning()
        return Translation({**self.fields, "messages": self.messages}, self.places, self.ignored, self.truncates)


def refuse(body: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise BadRequest for the first of these fields that asks for something."""
    for name in names:
        if body.get(name) not in (None, False, "", [], {}):
            raise BadRequest(f"'{name}' is not supported by this server.", name, "unsupported_value")


def unknown(name: str, here: str | None) -> BadRequest:
    """Return the error for a field that has another name here, or none."""
    one = "; a request has one answer." if name == "n" else " here."
    meant = f"; did you mean '{here}'?" if here else one
    return BadRequest(f"'{name}' is unknown{meant}", name, "unknown_parameter")


def as_text(value: Any, place: str) -> str:
    """Return a text; raises BadRequest for anything else."""
    if not isinstance(value, str):
        code = "missing_required_parameter" if value is None else "invalid_value"
        raise BadRequest(f"'{place}' must be a text.", place, code)
    return value


def as_object(value: Any, place: str) -> dict[str, Any]:
    """Return an object; raises BadRequest for anything else."""
    if not isinstance(value, dict):
        raise BadRequest(f"'{place}' must be an object.", place)
    return value


def as_list(value: Any, place: str, least: int = 1) -> list[tuple[Any, str]]:
    """Return the items of a list, each with its place; raises BadRequest for anything else, or for fewer than `least`."""
    if not isinstance(value, list) or len(value) < least:
        raise BadRequest(f"'{place}' must be a list{' that is not empty' if least else ''}.", place)
    return [(item, f"{place}[{number}]") for number, item in enumerate(value)]


def as_objects(value: Any, place: str, least: int = 1) -> list[tuple[dict[str, Any], str]]:
    """Return the objects of a list, each with its place; raises BadRequest as `as_list` and `as_object` do."""
    return [(as_object(item, at), at) for item, at in as_list(value, place, least)]
