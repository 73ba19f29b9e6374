"""The schemas of responses and their events for the API document; `server.dialects.responses` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from server.wire.sent.answers import AnswerBody, Extras, Object, ScoredToken


class ReasoningText(AnswerBody):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputText(AnswerBody):
    """A text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Object]
    logprobs: list[ScoredToken]
    """The tokens, if `include` asked for them."""


class ReasoningItem(AnswerBody):
    """The model's reasoning, if its chat template names tags for it."""

    type: Literal["reasoning"]
    id: str
    summary: list[Object]
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class MessageItem(AnswerBody):
    """A text of the assistant."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"]


class CallItem(AnswerBody):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    """JSON as the model writes it."""
    status: Literal["in_progress", "completed", "incomplete"]


class CachedInput(AnswerBody):
    """Details of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int
    """Always 0: what is written is not counted."""


class OutputDetails(AnswerBody):
    """Details of the output's tokens."""

    reasoning_tokens: int
    """Tokens up to the tag that ends the reasoning, tags included; 0 where the chat template names no tags."""


class ResponseUsage(AnswerBody):
    """Token counts, without those of baselines."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(AnswerBody):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteResponse(AnswerBody):
    """The reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponseBody(Extras):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix time in seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: ResponseFault | None
    incomplete_details: IncompleteResponse | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ReasoningItem | MessageItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Object
    store: bool
    """True if it can be retrieved and continued."""
    temperature: float
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    system_fingerprint: str
    """The model's fingerprint, not the server's."""
    ignored: list[str] = Field(default_factory=list)
    """The paths of the request's fields that nothing reads; absent if there are none."""


class ResponseEvent(AnswerBody):
    """The data of one event; the fields besides these are those of OpenAI's event of that type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.content_part.done", "response.output_item.done", "response.completed", "response.incomplete",
        "response.failed",
    ]  # fmt: skip
    sequence_number: int
    response: ResponseBody | None = None
    item: Any = None
    part: Any = None


class ResponseItems(AnswerBody):
    """Input items of a stored response."""

    object: Literal["list"]
    data: list[Object]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeletion(AnswerBody):
    """The confirmation that a response is deleted."""

    id: str
    object: Literal["response"]
    deleted: bool
