"""Bodies about stored completions, in OpenAI's form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.wire.sent.answers import AnswerBody, ChatCompletion
from server.wire.storing.metadata import Metadata
from server.wire.strangers import check_names
from server.wire.structured import CallForm


class StoredChange(BaseModel):
    """The change of a stored completion, of which only the metadata can change."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    metadata: Metadata
    """The new metadata, which replaces the old; `answer_correct` "true" or "false" marks whether the answer was right."""

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_names(value, cls.model_fields)
        return value


class RowsChange(StoredChange):
    """Metadata that come after an answer."""

    metadata: Metadata
    """Pairs that are set; others stay. `answer_correct` "true" or "false" marks whether the answer was right."""


class StoredCompletion(ChatCompletion):
    """A stored answer as it was sent, and its metadata."""

    metadata: dict[str, str]


class StoredCompletions(AnswerBody):
    """Stored answers."""

    object: Literal["list"]
    data: list[StoredCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(AnswerBody):
    """A message of the request, in the form of OpenAI's stored messages."""

    id: str
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None
    """The texts of the message, joined by line breaks."""
    content_parts: list[dict[str, Any]] | None
    """The parts, if the message had them; the URL of an image is `omitted`, since images are not kept."""
    tool_calls: list[CallForm] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StoredMessages(AnswerBody):
    """The messages of a stored answer's request."""

    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredDeletion(AnswerBody):
    """The confirmation that a stored answer is deleted."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: bool
