"""Traces by OpenTelemetry (the extra `otel`).

Each request of the API has a span, with spans below it for each answer's wait for a slot, its prefill and its decode. Only
imported if traces are switched on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from steering import Choice

NAMES = {
    "route": "http.route",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "error": "error.type",
    "request_id": "helmsight.request_id",
    "interventions": "helmsight.interventions",
}
"""Attributes of a request's span by their names in the log; all but our own follow OpenTelemetry's conventions."""


def resource() -> Resource:
    """Return the sender: from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, else this program's name."""
    own = Resource.create()
    named = not str(own.attributes["service.name"]).startswith("unknown_service")
    return own if named else own.merge(Resource({"service.name": "helmsight"}))


class Traces:
    """Spans sent to a provider; they contain nothing of what client and model said."""

    def __init__(self, provider: TracerProvider):
        self._tracer = provider.get_tracer("helmsight")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sent(cls) -> Traces:
        """Return traces that are sent in the background, as OTEL_EXPORTER_OTLP_ENDPOINT and similar variables say."""
        provider = TracerProvider(resource=resource())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begun(self, method: str, route: str, headers: Mapping[str, str]) -> Span:
        """Return the span of a request that has just arrived, below that of its `traceparent` (W3C) if it has one."""
        carrier = {name.lower(): value for name, value in headers.items()}
        return self._tracer.start_span(
            f"{method} {route}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )

    def answered(self, span: Span, choice: Choice) -> None:
        """Create the spans of a finished answer afterwards, with the engine's times."""
        if choice.timing is None:
            return
        began, within, times = time.time_ns() - time.monotonic_ns(), set_span_in_context(span), choice.timing
        for name, start, end, attributes in (
            ("queue", times.queued, times.admitted, {}),
            ("prefill", times.admitted, times.first, {}),
            ("decode", times.first, times.last, {"helmsight.tokens": len(choice.token_ids)}),
        ):
            part = self._tracer.start_span(
                name, within, attributes={"helmsight.choice": choice.index, **attributes}, start_time=began + _ns(start)
            )
            part.end(began + _ns(end))

    def ended(self, span: Span, status: int, notes: Mapping[str, Any]) -> None:
        """End a request's span with the attributes that the log has, too."""
        span.set_attribute("http.response.status_code", status)
        span.set_attributes({NAMES[name]: value for name, value in notes.items() if name in NAMES})
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    @staticmethod
    def ids(span: Span) -> dict[str, str]:
        """Return the ids of a span, for the log."""
        found = span.get_span_context()
        return {"trace_id": format_trace_id(found.trace_id), "span_id": format_span_id(found.span_id)}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
