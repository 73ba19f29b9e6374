"""Traces by OpenTelemetry (the extra `otel`).

Each request of the API has a span, and a chat one below it by the GenAI conventions, with spans below that for each
answer's wait for a slot, its prefill and its decode. Each number that a readout keeps is an attribute of the chat's span,
and an event of the Logs API. Only imported if traces are switched on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry._logs import SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.telemetry.conventions import (
    ERROR,
    EVALUATION,
    GEN_AI,
    HTTP,
    OPERATION,
    OWN,
    READOUT,
    Score,
    numbers_of,
    requested,
    scores,
)
from steering import Choice, Request

ENDED = {
    "error": ERROR,
    **OWN,
}
"""Attributes of a span at its end by the names of the request's notes for the log."""
USED = {name: GEN_AI[name] for name in ("prompt_tokens", "completion_tokens")}
"""Attributes of a chat's span alone, since tools add them up over all spans."""


def resource() -> Resource:
    """Return the sender: from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, else this program's name."""
    own = Resource.create()
    named = not str(own.attributes["service.name"]).startswith("unknown_service")
    return own if named else own.merge(Resource({"service.name": "helmsight"}))


class Traces:
    """Spans and events sent to providers; they contain nothing of what client and model said.

    Without a provider of logs there are no events, for tools that take spans only.
    """

    def __init__(self, provider: TracerProvider, logs: LoggerProvider | None = None):
        self._providers = [candidate for candidate in (provider, logs) if candidate is not None]
        self._tracer = provider.get_tracer("helmsight")
        self._logger = None if logs is None else logs.get_logger("helmsight")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sent(cls) -> Traces:
        """Return traces that are sent in the background, as OTEL_EXPORTER_OTLP_ENDPOINT and similar variables say.

        With OTEL_LOGS_EXPORTER=none there are no events.
        """
        provider, logs = TracerProvider(resource=resource()), None
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        if os.environ.get("OTEL_LOGS_EXPORTER", "").strip().lower() != "none":
            logs = LoggerProvider(resource=resource())
            logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        return cls(provider, logs)

    def close(self) -> None:
        """Send what waits to be sent, and nothing after it; harmless if repeated."""
        for provider in self._providers:
            provider.shutdown()
        self._providers = []

    def begun(self, method: str, route: str, headers: Mapping[str, str]) -> Span:
        """Return the span of a request that has just arrived, below that of its `traceparent` (W3C) if it has one."""
        carrier = {name.lower(): value for name, value in headers.items()}
        return self._tracer.start_span(
            f"{method} {route}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {HTTP["method"]: method, HTTP["route"]: route},
        )

    def chat(
        self, span: Span, request: Request, requested_model: str, model: str, answer_id: str, began: float
    ) -> Span:
        """Return the span of a chat that began at a time on the monotonic clock, below its request's span."""
        attributes = requested(request, requested_model)
        attributes |= {GEN_AI["model"]: model, GEN_AI["completion_id"]: answer_id}
        start = time.time_ns() - time.monotonic_ns() + _ns(began)
        return self._tracer.start_span(
            f"{OPERATION} {requested_model}", set_span_in_context(span), SpanKind.INTERNAL, attributes, start_time=start
        )

    def answered(self, span: Span, choice: Choice, answer_id: str) -> None:
        """Add a finished answer to its chat's span: its numbers, their events, and its parts by the engine's times.

        The attributes of the span are those of the first choice.
        """
        numbers = numbers_of(choice)
        if choice.index == 0:
            span.set_attributes({READOUT + name: value for name, value in numbers.items()})
        for score in scores(numbers):
            self._judge(score, answer_id, set_span_in_context(span), {OWN["choice"]: choice.index})
        if choice.timing is None:
            return
        began, within, times = time.time_ns() - time.monotonic_ns(), set_span_in_context(span), choice.timing
        for name, start, end, attributes in (
            ("queue", times.queued, times.admitted, {}),
            ("prefill", times.admitted, times.first, {}),
            ("decode", times.first, times.last, {OWN["tokens"]: len(choice.token_ids)}),
        ):
            part = self._tracer.start_span(
                name, within, attributes={OWN["choice"]: choice.index, **attributes}, start_time=began + _ns(start)
            )
            part.end(began + _ns(end))

    def judged(self, score: Score, answer_id: str, trace_id: str | None, span_id: str | None) -> None:
        """Emit the event of a score that comes after its answer, whose span has ended."""
        within = Context()
        if trace_id is not None and span_id is not None:
            parent = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1))
            within = set_span_in_context(NonRecordingSpan(parent), within)
        self._judge(score, answer_id, within, {})

    def _judge(self, score: Score, answer_id: str, within: Context, more: Mapping[str, Any]) -> None:
        if self._logger is not None:
            self._logger.emit(
                timestamp=time.time_ns(), context=within, event_name=EVALUATION, severity_number=SeverityNumber.INFO,
                attributes={**score.attributes(answer_id), **more},
            )  # fmt: skip

    def ended(self, span: Span, status: int, notes: Mapping[str, Any], chat: Span | None = None) -> None:
        """End a request's span, and its chat's, with the attributes that the log has, too."""
        attributes = {ENDED[name]: value for name, value in notes.items() if name in ENDED}
        if chat is not None:
            chat.set_attributes({USED[name]: value for name, value in notes.items() if name in USED})
        for target in (span,) if chat is None else (chat, span):
            target.set_attributes(attributes)
            if status >= 500 or (target is chat and ERROR in attributes):
                target.set_status(StatusCode.ERROR)
        if chat is not None:
            if reasons := notes.get("finish_reasons"):
                chat.set_attribute(GEN_AI["finish_reasons"], list(reasons))
            chat.end()
        span.set_attribute(HTTP["status"], status)
        span.end()

    @staticmethod
    def ids(span: Span) -> dict[str, str]:
        """Return the ids of a span, for the log."""
        span_context = span.get_span_context()
        return {"trace_id": format_trace_id(span_context.trace_id), "span_id": format_span_id(span_context.span_id)}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
