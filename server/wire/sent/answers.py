"""The schemas of chat answers for the API document; `server.dialects.answer` and `server.errors` build the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steering.protocol import intervention, readout

Object = dict[str, Any]


class AnswerBody(BaseModel):
    """An object that the server sends."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=(), defer_build=True)


class ErrorFields(AnswerBody):
    """The details of an error."""

    message: str
    """A sentence that names the field, the problem and the allowed values."""
    type: str
    """The kind of error of each status, such as `invalid_request_error`, `authentication_error`, `rate_limit_error`."""
    param: str | None
    """The path of the invalid field: `messages[0].content[1].image_url`."""
    code: str | None
    """A code for programs, such as `unknown_parameter`, `context_length_exceeded`."""


AN_ERROR: dict[str, Any] = {
    "error": {
        "message": "'steering.toward' must be 'vision', 'text' or 'auto'; got 'left'.",
        "type": "invalid_request_error",
        "param": "steering.toward",
        "code": "invalid_value",
    }
}


class ErrorBody(AnswerBody):
    """Every error, in OpenAI's format."""

    model_config = ConfigDict(json_schema_extra={"examples": [AN_ERROR]})

    error: ErrorFields


class TokenScore(AnswerBody):
    """A token."""

    token: str
    logprob: float
    """The log-probability in nats; -9999 represents minus infinity."""
    bytes: list[int]


class ScoredToken(TokenScore):
    """A token of the answer."""

    top_logprobs: list[TokenScore]
    """The likeliest tokens at its position, best first."""


class Scores(AnswerBody):
    """OpenAI's logprobs object."""

    content: list[ScoredToken]
    refusal: None


class PictureLayout(AnswerBody):
    """The layout of an image's tokens."""

    image: int
    """The number of the image, counted from 1."""
    tokens: int
    grid: tuple[int, int] | None
    """Rows and columns of its maps, null if there is no such grid."""
    overview: tuple[int, int] | None = None
    """For an image in tiles: the grid of the tile that shows the whole image."""


class LookedFrom(AnswerBody):
    """The number of rows that attention was averaged over."""

    question: int
    """Tokens of the question that can attend to every image."""
    output: int
    """Generated tokens that were run through the model."""
    last: int
    """The prompt's last token, which is used if there are no other rows."""


def _readouts(schema: dict[str, Any]) -> None:
    own = {name: entry for name, entry in readout.REGISTRY.items() if entry.part_of is None}
    schema["properties"] |= {
        name: {"type": ["object", "array", "null"], "description": entry.__doc__ or ""} for name, entry in own.items()
    }


class Envelope(AnswerBody):
    """The values of the requested readouts; null for values that do not exist."""

    model_config = ConfigDict(json_schema_extra=_readouts)

    version: int
    """Incremented when a key changes its meaning."""
    images: list[PictureLayout]
    rows: LookedFrom


class SteeredTokens(AnswerBody):
    """The tokens that a vector is added to."""

    tokens: str


class SteerSettings(AnswerBody):
    """The settings of one applied vector."""

    name: str
    digest: str
    """A hash of the vector and of what its strengths mean."""
    toward: str | None
    """The requested modality."""
    strength: float
    published: float | None
    """The strength in published units; null if the vector's published weight is not known."""
    scale: float | None
    """The signed coefficient c; null in a dry run if the direction is not decided yet."""
    layers: list[int]
    apply: SteeredTokens
    warning: str | None
    """A warning if the strength is beyond the calibrated range, or if vision is preferred without an image."""


class AppliedSteer(SteerSettings):
    """The effect of one vector."""

    tokens: int
    """The number of tokens that it was added to."""
    dose: float | None
    """|added| / |h|, mean over the tokens and the layers."""
    auto: Object | None = None
    """The measurements that decided the direction."""
    gate: Object | None = None
    """The measurements of the conditions, and whether they hold."""
    until: Object | None = None
    """The course of a strength that followed a number."""


def _reports(schema: dict[str, Any]) -> None:
    heads = dict.fromkeys(kind.path[0] for kind, _ in intervention.REGISTRY.values())
    about = "The effect, null for none; of a group, by member."
    schema["properties"] |= {
        head: {"type": ["object", "array", "null"], "description": about}
        for head in heads
        if head not in schema["properties"]
    }


class SkippedField(AnswerBody):
    """A skipped part of the request."""

    field: str
    """The place in a request, such as `sage.see`."""
    why: str


class ShrunkPicture(AnswerBody):
    """An image that was scaled down to fit into the context."""

    image: int
    """The number of the image, counted from 1."""
    before: list[int] = Field(alias="from")
    """The original width and height in pixels."""
    after: list[int] = Field(alias="to")
    """The width and height that the model saw."""


class Applied(AnswerBody):
    """The actual effect of each requested intervention."""

    model_config = ConfigDict(json_schema_extra=_reports)

    steering: list[AppliedSteer] = []
    """The effects, vector by vector."""
    preset: str | None = None
    """The preset that the request named."""
    skipped: list[SkippedField] = []
    """The parts of a preset, or of a request with `"strict": false`, that did not apply."""
    max_tokens: int | None = None
    """The longest answer that fitted, if more tokens were requested."""
    pictures: list[ShrunkPicture] = []
    """The images that were scaled down because they did not fit beside the text and the answer."""


class CallOf(AnswerBody):
    """The called function and its arguments."""

    name: str | None = None
    """The function's name; in a stream, only in the first piece."""
    arguments: str
    """JSON as the model writes it; in a stream, the new characters."""


class CallMade(AnswerBody):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CallOf


class CallDelta(AnswerBody):
    """A piece of a tool call."""

    index: int
    """The number of the call within the answer, from 0."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallOf


class Said(AnswerBody):
    """OpenAI's message."""

    role: Literal["assistant"]
    content: str | None
    """The text of the answer; null if it only calls tools."""
    refusal: None
    tool_calls: list[CallMade] = []
    """The tool calls; absent if there are none."""


class BaselineChoice(AnswerBody):
    """The answer without interventions."""

    message: Said
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    diagnostics: Envelope | None = None


class GuardedAnswer(AnswerBody):
    """An answer of a guarded choice."""

    raised: list[str]
    """The conditions that it met."""
    numbers: dict[str, float | bool | None]
    """The numbers that the conditions are about."""
    text: str
    tool_calls: list[CallOf] = []
    """The tool calls, without ids; absent if there are none."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    completion_tokens: int
    seed: int | None
    """The seed with which a request of this answer alone gives it again; null without one."""
    applied: Object | None


class GuardReport(AnswerBody):
    """The tries of a guarded choice."""

    outcome: Literal["quiet", "first", "cut", "retry", "same", "failed"]
    """quiet: no condition was met. retry: a new answer was kept. Else the first one was kept, because the new ones met a
    condition (first), one that met none was cut at `max_tokens` (cut), a new one could only be the same (same), or it could
    not be given again (failed).
    """
    kept: int
    """The number of the kept answer in the list, from 0."""
    answers: list[GuardedAnswer]
    failed: str | None = None
    """The error of a failed retry."""


class Extras(AnswerBody):
    """The fields beyond OpenAI's, each present only if requested."""

    applied: Applied | None = None
    diagnostics: Envelope | None = None
    guard: GuardReport | None = None
    baseline: BaselineChoice | None = None


class CompletionChoice(Extras):
    """A choice of an answer."""

    index: int
    message: Said
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class PromptTokens(AnswerBody):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Tokens whose keys and values were in the prefix cache, so that they were not computed again."""


class TokenCounts(AnswerBody):
    """Token counts, without those of baselines."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Head(AnswerBody):
    """The fields that all objects of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """The model's fingerprint, not the server's."""


class PromptScore(AnswerBody):
    """A token at a position of the prompt."""

    logprob: float
    """The log-probability in nats; -9999 represents minus infinity."""
    rank: int
    """1 for the likeliest token."""
    decoded_token: str


class ChatCompletion(Head):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[CompletionChoice]
    usage: TokenCounts
    prompt_logprobs: list[dict[str, PromptScore] | None] = []
    """The prompt's tokens by their numbers, null for the first one; only if requested."""
    ignored: list[str] = []
    """The paths of the request's fields that nothing reads, such as `messages[0].name`; absent if there are none."""


class Delta(AnswerBody):
    """The new part of a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Extras):
    """A piece of one choice; the last one holds the finish reason and the extras."""

    index: int
    delta: Delta
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Head):
    """The data of one event; `data: [DONE]` is the last event.

    An error during the stream is an event with an error object.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: TokenCounts | None = None
    """With `stream_options.include_usage`: null except in the event after the last choice."""
    ignored: list[str] = []
    """The same as in a whole answer; sent with the last event."""
