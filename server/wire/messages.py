"""The messages of a chat: turns, parts, images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.wire.strangers import check_names
from server.wire.structured import CallForm
from steering.protocol.wording import shown

Detail = Literal["low", "high", "auto", "original"]
"""All values that OpenAI's clients send; all but "low" keep the model's own bounds."""


class Written(BaseModel):
    """An object as a client writes it; the functions below read it and word its errors."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class TextPart(Written):
    """A text."""

    type: Literal["text", "input_text"]
    text: str
    span: Literal["context"] | None = None
    """"context" marks a text that the image may contradict, in a message of any role.

    So does a line that begins with `Text context:`, except in messages of the assistant.
    """


class ImageUrl(Written):
    """The location of an image."""

    url: str
    """A `data:image/...;base64,` URI; an http(s) URL if the server fetches those."""
    detail: Detail | None = None
    """"low" allows at most 512 x 512 pixels, if the model's processor bounds them; others keep its own bounds.

    "high" refuses an image that does not fit into the context; the others scale it down.
    """


class ImagePart(Written):
    """An image, in any message but a system's; in others than a user's if the model's chat template supports it."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str
    detail: Detail | None = None
    """The same as in `image_url`."""


class ChatMessage(Written):
    """A turn of the chat, at least one of which is a user's; "developer" is read as "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[CallForm] | None = None
    """The tool calls of an assistant's answer."""
    tool_call_id: str | None = None
    """For a tool's message, the id of the call that it answers."""
    reasoning_content: str | None = None
    """The reasoning of an assistant's answer; it is listed in `ignored` if the model's chat template has no place for it."""
    content: str | Annotated[list[TextPart | ImagePart], Field(min_length=1)] | None = None
    """A text, or texts and images in order; only an assistant's may be omitted."""


class MessagePart(BaseModel):
    """A part of a message's content; `image` holds the URL of an image part, `detail` its requested size."""

    type: str
    text: str | None = None
    span: Literal["context"] | None = None
    image: str | None = None
    detail: str | None = None


def _part(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("part", "must be an object with a 'type'")
    kind = value.get("type")
    if kind in ("text", "input_text"):
        if not isinstance(value.get("text"), str):
            raise PydanticCustomError("part_text", "a text part needs a string in 'text'")
        check_names(value, TextPart.model_fields)
        return {"type": "text", "text": value["text"], "span": value.get("span")}
    if kind in ("image_url", "input_image"):
        image = value.get("image_url")
        within = image if isinstance(image, dict) else {**value, "url": image}
        url = within.get("url")
        if not isinstance(url, str):
            raise PydanticCustomError("part_image", "an image part needs a URL in 'image_url.url'")
        check_names(value, ImagePart.model_fields)
        detail = within.get("detail")
        if detail is not None and detail not in get_args(Detail):
            place, allowed = "image_url.detail" if within is image else "detail", ", ".join(get_args(Detail))
            raise PydanticCustomError(
                "part_detail",
                "'{place}' must be one of: {allowed}; got {value}",
                {"place": place, "allowed": allowed, "value": shown(detail)},
            )
        return {"type": "image", "image": url, "detail": detail if detail in ("low", "high") else None}
    raise PydanticCustomError(
        "part_type", "unsupported content type '{kind}'; allowed: text, image_url", {"kind": str(kind)[:64]}
    )


Part = Annotated[MessagePart, BeforeValidator(_part, json_schema_input_type=TextPart | ImagePart)]


class Message(BaseModel):
    """A turn of the chat as it was read; `ChatMessage` is its written form."""

    role: Literal["system", "user", "assistant", "tool"]
    tool_calls: list[CallForm] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<parts>")],
        Discriminator(lambda content: "<text>" if isinstance(content, str) else "<parts>"),
    ]

    @model_validator(mode="after")
    def _no_images_of_systems(self) -> Self:
        if self.role == "system" and isinstance(self.content, list) and any(p.type == "image" for p in self.content):
            raise PydanticCustomError("image_role", "images are not allowed in system messages")
        return self


def _message(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("message", "must be an object with 'role' and 'content'")
    role, content = value.get("role"), value.get("content")
    if role == "function" or value.get("function_call"):
        raise PydanticCustomError("unsupported", "functions are not supported; use 'tool_calls' and role 'tool'")
    if value.get("tool_calls") and role != "assistant":
        raise PydanticCustomError("calls", "'tool_calls' may only be in messages of the assistant")
    reasoning = value.get("reasoning_content")
    if reasoning is not None and (role != "assistant" or not isinstance(reasoning, str)):
        raise PydanticCustomError(
            "reasoning", "'reasoning_content' must be a string, and may only be in messages of the assistant"
        )
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise PydanticCustomError(
            "role", "unknown role '{role}'; allowed: system, developer, user, assistant, tool", {"role": str(role)[:64]}
        )
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, (str, list)):
        raise PydanticCustomError("content", "'content' must be a string or a list of parts")
    if content == []:
        raise PydanticCustomError("content", "'content' must not be an empty list")
    calls = {"tool_calls": value.get("tool_calls") or None, "tool_call_id": value.get("tool_call_id")}
    return {"role": role, "content": content, **calls, "reasoning_content": reasoning or None}


Turn = Annotated[Message, BeforeValidator(_message, json_schema_input_type=ChatMessage)]


def texts_of(messages: Iterable[Message]) -> list[str]:
    """Return every text of a chat that the model reads."""
    texts = []
    for message in messages:
        contents = [message.content] if isinstance(message.content, str) else [part.text for part in message.content]
        called = [text for call in message.tool_calls or () for text in (call.function.name, call.function.arguments)]
        texts += [text for text in (*contents, *called, message.reasoning_content) if text is not None]
    return texts


def image_urls(messages: Iterable[Message]) -> Iterator[tuple[str, str]]:
    """Yield (URL, path of its field) of every image, in order."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.image is not None:
                yield part.image, f"messages[{i}].content[{j}].image_url"
