"""What answers to chats look like, for the document of the API; `server.api.answers` and `server.errors` make them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steering.protocol import intervention, readout

Object = dict[str, Any]


class AnswerBody(BaseModel):
    """An object that the server makes."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=(), defer_build=True)


class ErrorFields(AnswerBody):
    """What was wrong."""

    message: str
    """One sentence: which field, what is wrong, what is allowed."""
    type: str
    """A kind for each status, such as `invalid_request_error`, `authentication_error`, `rate_limit_error`."""
    param: str | None
    """The field that is wrong, by its path: `messages[0].content[1].image_url`."""
    code: str | None
    """For programs, such as `unknown_parameter`, `context_length_exceeded`."""


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
    """In nats; -9999 stands for minus infinity."""
    bytes: list[int]


class ScoredToken(TokenScore):
    """A token of the answer."""

    top_logprobs: list[TokenScore]
    """The likeliest tokens in its place, best first."""


class Scores(AnswerBody):
    """OpenAI's logprobs object."""

    content: list[ScoredToken]
    refusal: None


class PictureLayout(AnswerBody):
    """How a picture became tokens."""

    image: int
    """Counted from 1."""
    tokens: int
    grid: tuple[int, int] | None
    """Rows and columns of its maps, null where there is no such grid."""
    overview: tuple[int, int] | None = None
    """Of a picture in tiles: the grid of the tile that shows the whole."""


class LookedFrom(AnswerBody):
    """How many rows attention was averaged over."""

    question: int
    """Tokens of the question that can attend to every picture."""
    output: int
    """Generated tokens that went through the model."""
    last: int
    """The prompt's last one, which stands in where there are no others."""


def _readouts(schema: dict[str, Any]) -> None:
    own = {name: one for name, one in readout.REGISTRY.items() if one.part_of is None}
    schema["properties"] |= {
        name: {"type": ["object", "array", "null"], "description": one.__doc__ or ""} for name, one in own.items()
    }


class Envelope(AnswerBody):
    """What the readouts say that were asked for; null where a value does not exist."""

    model_config = ConfigDict(json_schema_extra=_readouts)

    version: int
    """Raised when a key changes its meaning."""
    images: list[PictureLayout]
    rows: LookedFrom


class SteeredTokens(AnswerBody):
    """What a vector is added to."""

    tokens: str


class SteerSettings(AnswerBody):
    """How one vector is applied."""

    name: str
    toward: str | None
    """The modality that was asked for."""
    strength: float
    published: float | None
    """The strength in published units; null where the vector's published weight is not known."""
    scale: float | None
    """The signed coefficient c; null in a dry run where the way is still to be found."""
    layers: list[int]
    apply: SteeredTokens
    warning: str | None
    """That the strength is beyond what was calibrated."""


class AppliedSteer(SteerSettings):
    """What one vector did."""

    tokens: int
    """How many it was added to."""
    dose: float | None
    """|added| / |h|, mean over the tokens and the layers."""
    auto: Object | None = None
    """What was measured to find the way."""


def _reports(schema: dict[str, Any]) -> None:
    heads = dict.fromkeys(kind.path[0] for kind, _ in intervention.REGISTRY.values())
    about = "What was done, null for nothing; of a group, by member."
    schema["properties"] |= {
        head: {"type": ["object", "array", "null"], "description": about}
        for head in heads
        if head not in schema["properties"]
    }


class SkippedField(AnswerBody):
    """What was left out."""

    field: str
    """Its place in a request, such as `sage.see`."""
    why: str


class ShrunkPicture(AnswerBody):
    """A picture that was scaled down to fit into the context."""

    image: int
    """Counted from 1."""
    before: list[int] = Field(alias="from")
    """Its width and height in pixels."""
    after: list[int] = Field(alias="to")
    """Those that the model saw."""


class Applied(AnswerBody):
    """What each intervention that was asked for really did."""

    model_config = ConfigDict(json_schema_extra=_reports)

    steering: list[AppliedSteer] = []
    """Vector by vector."""
    preset: str | None = None
    """That the request named."""
    skipped: list[SkippedField] = []
    """What did not apply, of a preset or of a request with `"strict": false`."""
    max_tokens: int | None = None
    """The longest answer that fitted, where more tokens were asked for."""
    pictures: list[ShrunkPicture] = []
    """Those that were scaled down, because they did not fit beside the text and the answer."""


class CallOf(AnswerBody):
    """Which function is called, and with what."""

    name: str | None = None
    """In a stream, with the first piece."""
    arguments: str
    """JSON, as the model writes it; in a stream, what comes new."""


class CallMade(AnswerBody):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CallOf


class CallDelta(AnswerBody):
    """A piece of a call."""

    index: int
    """Which call of the answer it is, from 0."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallOf


class Said(AnswerBody):
    """OpenAI's message."""

    role: Literal["assistant"]
    content: str | None
    """null where it only calls."""
    refusal: None
    tool_calls: list[CallMade] = []
    """Only where there are some."""


class BaselineChoice(AnswerBody):
    """The answer without interventions."""

    message: Said
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    diagnostics: Envelope | None = None


class Extras(AnswerBody):
    """The fields beyond OpenAI's, each only when it was asked for."""

    applied: Applied | None = None
    diagnostics: Envelope | None = None
    baseline: BaselineChoice | None = None


class CompletionChoice(Extras):
    """One answer."""

    index: int
    message: Said
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class PromptTokens(AnswerBody):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those that had been run before, and were not run again."""


class TokenCounts(AnswerBody):
    """Tokens; those of baselines are not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Head(AnswerBody):
    """What all objects of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """The model's, not the server's."""


class ChatCompletion(Head):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[CompletionChoice]
    usage: TokenCounts
    ignored: list[str] = []
    """Only where there are some: the paths of the request's fields that nothing reads, such as `messages[0].name`."""


class Delta(AnswerBody):
    """What comes new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Extras):
    """A piece of one answer; the last one says how it ended and holds the extras."""

    index: int
    delta: Delta
    logprobs: Scores | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Head):
    """The data of one event; `data: [DONE]` is the last event. What goes wrong meanwhile is an event with an error."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: TokenCounts | None = None
    """With `stream_options.include_usage`: null but in the event after the last choice."""
    ignored: list[str] = []
    """As of a whole answer, in the last event."""
