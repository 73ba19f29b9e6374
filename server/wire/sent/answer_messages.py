"""The schemas of Anthropic's messages and their events for the API document; `server.dialects.messages` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from server.wire.sent.answers import AnswerBody, Extras, Object


class AnswerText(AnswerBody):
    """A text."""

    type: Literal["text"]
    text: str


class AnswerThinking(AnswerBody):
    """The model's reasoning, if its chat template names tags for it."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty."""


class AnswerToolUse(AnswerBody):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class MessageUsage(AnswerBody):
    """Token counts, without those of baselines."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    output_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that came from a cache."""
    cache_creation_input_tokens: int
    """Always 0: what is written is not counted."""


class MessageBody(Extras):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    """The text of the request that ended the answer."""
    usage: MessageUsage
    ignored: list[str] = Field(default_factory=list)
    """The paths of the request's fields that nothing reads; absent if there are none."""


class MessageEvent(Extras):
    """The data of one event; `message_delta` holds the fields beyond Anthropic's."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageBody | None = None
    index: int | None = None
    content_block: Any = None
    delta: Any = None
    usage: MessageUsage | None = None
    ignored: list[str] = Field(default_factory=list)


class MessageFault(AnswerBody):
    """The details of an error."""

    type: str
    message: str
    param: str | None
    """The path of the invalid field."""
    code: str | None
    """A code for programs."""


class MessageError(AnswerBody):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessageFault
    request_id: str | None


class MessageCount(AnswerBody):
    """The number of tokens of a prompt."""

    input_tokens: int
    ignored: list[str] = Field(default_factory=list)
    """The paths of the request's fields that nothing reads; absent if there are none."""
