"""Traces by OpenTelemetry (the extra `otel`): a span for each request of the API, and below it, for each answer, its wait
for a slot, its prefill and its decode. Imported where traces are switched on, and nowhere else."""

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
"""Attributes of a request's span, by what the log calls them; but for our own, OpenTelemetry's conventions have them."""


def resource() -> Resource:
    """Who sends: what OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say, else this program's name."""
    own = Resource.create()
    named = not str(own.attributes["service.name"]).startswith("unknown_service")
    return own if named else own.merge(Resource({"service.name": "helmsight"}))


class Traces:
    """Spans, handed to a provider; nothing of what client and model said is in them."""

    def __init__(self, provider: TracerProvider):
        self._tracer = provider.get_tracer("helmsight")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sent(cls) -> Traces:
        """Traces that are sent as OTEL_EXPORTER_OTLP_ENDPOINT and its like say, in the background."""
        provider = TracerProvider(resource=resource())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begun(self, method: str, route: str, headers: Mapping[str, str]) -> Span:
        """The span of a request that has just come; below that of its `traceparent` (W3C), where it has one."""
        carrier = {name.lower(): value for name, value in headers.items()}
        return self._tracer.start_span(
            f"{method} {route}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )

    def answered(self, span: Span, choice: Choice) -> None:
        """The spans of a finished answer, made afterwards: its times are the engine's."""
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
        """End a request's span with what the log says of it."""
        span.set_attribute("http.response.status_code", status)
        span.set_attributes({NAMES[name]: value for name, value in notes.items() if name in NAMES})
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    @staticmethod
    def ids(span: Span) -> dict[str, str]:
        """The ids of a span, for the log."""
        found = span.get_span_context()
        return {"trace_id": format_trace_id(found.trace_id), "span_id": format_span_id(found.span_id)}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
