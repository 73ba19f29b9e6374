"""The schemas of the journal's answers, for the API document; `server.journal` builds the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from server.wire.sent.answers import AnswerBody, Object
from steering.protocol.readout import REGISTRY


def _scalars(schema: dict[str, Any]) -> None:
    kinds = {float: "number", int: "integer", bool: "boolean"}
    scalars = {name: kind for readout in REGISTRY.values() for name, kind in readout.scalars.items()}
    schema["properties"] |= {name: {"type": [kinds[kind], "null"]} for name, kind in scalars.items()}


ADDED_FIELDS: dict[str, Any] = {}
"""Further fields of a row, those of the database's later columns, as JSON schema."""


def _added(schema: dict[str, Any]) -> None:
    schema["properties"] |= ADDED_FIELDS
    schema["required"] = [*schema["required"], *ADDED_FIELDS]


class RowNumbers(AnswerBody):
    """The numbers kept of readouts, whichever were requested."""

    model_config = ConfigDict(json_schema_extra=_scalars)

    dose: float | None
    """Mean over all vectors."""


class RowLatency(AnswerBody):
    """Latencies in seconds since the request arrived."""

    first_token: float | None
    total: float


class RowTokens(AnswerBody):
    """Token counts."""

    prompt_tokens: int | None
    completion_tokens: int | None


class RowTexts(AnswerBody):
    """Prompt and answer, if the server keeps them."""

    prompt: str | None
    answer: str | None


class RowOfAnswer(AnswerBody):
    """A choice of an answer; tables have a column for each entry of its objects, under the same names."""

    model_config = ConfigDict(json_schema_extra=_added)

    object: Literal["diagnostics.row"]
    id: str
    choice: int
    created: float
    """Unix time at which the request was accepted."""
    model: str
    key_name: str | None
    """The name of the request's key; null if that has none."""
    finish_reason: str
    """stop, length, cancelled, error or shutdown."""
    streamed: bool
    interventions: list[str]
    toward: str
    """The direction of steering: vision, text, other or none."""
    vectors: list[str]
    """The requested steering vectors."""
    answer_correct: bool | None
    """What `metadata` says of the answer."""
    digests: list[str] | None
    """The requested steering vectors as `name@digest`, which a request may pin; null in rows of an older server."""
    asked: Object
    applied: Object | None
    sampling: Object
    usage: RowTokens
    images: int
    latency: RowLatency
    diagnostics: RowNumbers
    metadata: dict[str, str] | None
    texts: RowTexts | None


class PageOfRows(AnswerBody):
    """Rows, newest first."""

    object: Literal["list"]
    data: list[RowOfAnswer]
    has_more: bool
    next: str | None
    """The value of `before` for the next page."""


class RowsOfAnswer(AnswerBody):
    """The rows of one answer, one for each choice."""

    object: Literal["list"]
    data: list[RowOfAnswer]


class Spread(AnswerBody):
    """The distribution of a number."""

    count: int
    mean: float | None
    min: float | None
    p10: float | None
    p50: float | None
    p90: float | None
    max: float | None


class RaisedFlag(AnswerBody):
    """The number of answers in which a flag was known, and in which it was raised."""

    known: int
    raised: int


class FocusAccuracy(AnswerBody):
    """The share of answers whose focused image was the target."""

    known: int
    correct: int
    accuracy: float | None


class MisunderstandingRate(AnswerBody):
    """The share of right answers with a wrong focus (implicit visual misunderstanding)."""

    known: int
    implicit: int
    rate: float | None


class MeansOfRows(AnswerBody):
    """Means over several rows."""

    count: int
    attention_ratio: float | None
    focus_share: float | None
    decay_slope: float | None


class ByIntervention(MeansOfRows):
    """The rows of one intervention, or of a combination of several."""

    intervention: str
    accuracy: float | None


class ByHour(MeansOfRows):
    """The rows of an hour."""

    start: int
    """Unix time."""
    perceptual_blindness: int
    dissociation: int


class Times(AnswerBody):
    """Median and 90 % quantile, in seconds, of answers that ran to their end."""

    p50: float | None
    p90: float | None


class Period(MeansOfRows):
    """The rows of a period."""

    start: int
    """Unix time."""
    errors: int
    """Rows with an error, including those that the server's shutdown cut off."""
    cancelled: int
    flags: dict[str, int]
    """The number of rows in which each flag was raised."""
    first_token: Times
    """Seconds from the request to its first token."""
    total: Times
    """Seconds from the request to the answer's end."""


class Periods(AnswerBody):
    """The rows over time."""

    bucket: int
    """Seconds of a period."""
    rows: list[Period]
    """The newest periods that have rows, oldest first."""


class RefusalKind(AnswerBody):
    """Requests that were refused with the same error."""

    status: int
    code: str
    """The code of the error."""
    route: str
    count: int


class RefusalPeriod(AnswerBody):
    """The refused requests of a period."""

    start: int
    """Unix time."""
    count: int
    statuses: dict[str, int]


class RefusalPeriods(AnswerBody):
    """The refused requests over time."""

    bucket: int
    """Seconds of a period."""
    rows: list[RefusalPeriod]
    """The newest periods that have refusals, oldest first."""


class RefusedRequests(AnswerBody):
    """Requests that were answered with an error and left no row; only the filters on time apply, in whole minutes."""

    count: int
    by_code: list[RefusalKind]
    """Most frequent first."""
    by_time: RefusalPeriods


class JournalSummary(AnswerBody):
    """A summary of the matching rows."""

    object: Literal["diagnostics.summary"]
    since: float | None
    until: float | None
    count: int
    sampled: int
    """Number of newest rows from which everything but `count` is computed."""
    finish_reasons: dict[str, int]
    sources: dict[str, int]
    """Rows by the source of their request."""
    guards: dict[str, int]
    """Guarded rows by the outcome of their guard."""
    values: dict[str, Spread]
    """Times and tokens of answers that ran to their end."""
    flags: dict[str, RaisedFlag]
    focus: FocusAccuracy
    ivm: MisunderstandingRate
    by_intervention: list[ByIntervention]
    by_hour: list[ByHour]
    by_time: Periods
    refusals: RefusedRequests
