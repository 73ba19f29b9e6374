"""What the journal says, for the document of the API; `server.journal` makes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from server.wire.answers import AnswerBody, Object
from steering.protocol.readout import REGISTRY


def _scalars(schema: dict[str, Any]) -> None:
    kinds = {float: "number", int: "integer", bool: "boolean"}
    found = {name: kind for one in REGISTRY.values() for name, kind in one.scalars.items()}
    schema["properties"] |= {name: {"type": [kinds[kind], "null"]} for name, kind in found.items()}


class RowNumbers(AnswerBody):
    """The numbers that are kept of the readouts, whichever were asked for."""

    model_config = ConfigDict(json_schema_extra=_scalars)

    dose: float | None
    """Of all vectors, mean."""


class RowLatency(AnswerBody):
    """In seconds since the request came."""

    first_token: float | None
    total: float


class RowTokens(AnswerBody):
    """Tokens."""

    prompt_tokens: int | None
    completion_tokens: int | None


class RowTexts(AnswerBody):
    """Prompt and answer, where the server keeps them."""

    prompt: str | None
    answer: str | None


class RowOfAnswer(AnswerBody):
    """One choice of one answer."""

    object: Literal["diagnostics.row"]
    id: str
    choice: int
    created: float
    """Unix time when the request was accepted."""
    model: str
    key_name: str | None
    """Of the key that it was asked with; null where that has no name."""
    finish_reason: str
    """stop, length, cancelled, error or shutdown."""
    streamed: bool
    interventions: list[str]
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
    """What `before` of the next page is."""


class RowsOfAnswer(AnswerBody):
    """The rows of one answer, one a choice."""

    object: Literal["list"]
    data: list[RowOfAnswer]


class Spread(AnswerBody):
    """How a number is distributed."""

    count: int
    mean: float | None
    min: float | None
    p10: float | None
    p50: float | None
    p90: float | None
    max: float | None


class RaisedFlag(AnswerBody):
    """How often a flag was known, and raised."""

    known: int
    raised: int


class FocusAccuracy(AnswerBody):
    """How often the focused picture was the target."""

    known: int
    correct: int
    accuracy: float | None


class MisunderstandingRate(AnswerBody):
    """How often the focus was wrong though the answer was right (implicit visual misunderstanding)."""

    known: int
    implicit: int
    rate: float | None


class MeansOfRows(AnswerBody):
    """Means over some rows."""

    count: int
    attention_ratio: float | None
    focus_share: float | None
    decay_slope: float | None


class ByIntervention(MeansOfRows):
    """The rows of one intervention, or of several together."""

    intervention: str
    accuracy: float | None


class ByHour(MeansOfRows):
    """The rows of an hour."""

    start: int
    """Unix time."""
    perceptual_blindness: int
    dissociation: int


class Times(AnswerBody):
    """Median and 90 % quantile, in seconds, of those answers that came to their end."""

    p50: float | None
    p90: float | None


class Period(MeansOfRows):
    """The rows of a period."""

    start: int
    """Unix time."""
    errors: int
    """Those that the server's end cut off among them."""
    cancelled: int
    flags: dict[str, int]
    """How often each was raised."""
    first_token: Times
    total: Times


class Periods(AnswerBody):
    """The rows over time."""

    bucket: int
    """Seconds of a period."""
    rows: list[Period]
    """The newest periods that have rows, oldest first."""


class RefusalKind(AnswerBody):
    """Requests that were refused in the same way."""

    status: int
    code: str
    """Of the error."""
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
    """The newest periods that have any, oldest first."""


class RefusedRequests(AnswerBody):
    """Requests that were answered with an error and left no row; of all filters only the time applies, in whole minutes."""

    count: int
    by_code: list[RefusalKind]
    """Most frequent first."""
    by_time: RefusalPeriods


class JournalSummary(AnswerBody):
    """What the matching rows say together."""

    object: Literal["diagnostics.summary"]
    since: float | None
    until: float | None
    count: int
    sampled: int
    """How many of the newest everything but `count` is computed from."""
    finish_reasons: dict[str, int]
    values: dict[str, Spread]
    """Times and tokens of those answers that came to their end."""
    flags: dict[str, RaisedFlag]
    focus: FocusAccuracy
    ivm: MisunderstandingRate
    by_intervention: list[ByIntervention]
    by_hour: list[ByHour]
    by_time: Periods
    refusals: RefusedRequests
