"""Spans of requests: whose they are, what lies below them and when; without them nothing of OpenTelemetry is needed."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flask import Flask

import server
import steering
from server.app import create_app
from server.settings import Settings, SettingsError
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> object:
    """Return an exporter that keeps finished spans."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def traced(app: Flask, spans: object) -> Flask:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from server.telemetry.tracing import Traces

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app.extensions["helmsight"] = replace(app.extensions["helmsight"], traces=Traces(provider))
    return app


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_what_its_answers_waited_for(
    engine: steering.Engine, settings: Settings, spans: object, stream: bool
) -> None:
    client = traced(create_app(settings, engine=engine), spans).test_client()
    body = {"n": 2, "max_tokens": 3, "stream": stream, "steering": {"toward": "text"}}
    content = [{"type": "image_url", "image_url": {"url": data_uri()}}, {"type": "text", "text": "secret words"}]
    head = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "mine"}
    body["messages"] = [{"role": "user", "content": content}]
    assert client.post("/v1/chat/completions", json=body, headers=head, buffered=True).status_code == 200
    client.get("/health", buffered=True)
    found = spans.get_finished_spans()
    *parts, chat, request = found
    assert (chat.name, chat.parent.span_id) == ("chat helmsight-demo", request.context.span_id)
    assert request.name == "POST /v1/chat/completions"
    assert (format(request.context.trace_id, "032x"), format(request.parent.span_id, "016x")) == (TRACE, PARENT)
    assert [(one.attributes["helmsight.choice"], one.name) for one in sorted(parts, key=_place)] == [
        (choice, name) for choice in (0, 1) for name in ("queue", "prefill", "decode")
    ]
    assert all(one.parent.span_id == chat.context.span_id for one in parts)
    slack = 2_000_000  # two clocks are compared, of which one may be set meanwhile
    for choice in (0, 1):
        queue, prefill, decode = sorted((one for one in parts if _place(one)[0] == choice), key=_place)
        times = [request.start_time - slack, queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
        assert times == sorted(times)
        assert decode.end_time <= request.end_time + slack
        assert abs(queue.end_time - prefill.start_time) + abs(prefill.end_time - decode.start_time) < slack
    assert chat.attributes["gen_ai.usage.output_tokens"] == sum(
        one.attributes["helmsight.tokens"] for one in parts if one.name == "decode"
    )
    assert chat.attributes["gen_ai.usage.input_tokens"] > 0
    said = dict(request.attributes)
    assert not any(name.startswith("gen_ai.") for name in said), "a sum over all spans would count tokens twice"
    assert said["helmsight.interventions"] == ("steering",)
    assert (said["http.response.status_code"], said["helmsight.request_id"]) == (200, "mine")
    assert not any("secret" in one.to_json() for one in found)


def _place(span: object) -> tuple[int, int]:
    return span.attributes["helmsight.choice"], ("queue", "prefill", "decode").index(span.name)


def test_an_error_is_one_of_its_span(fake: FakeEngine, spans: object) -> None:
    client = traced(create_app(Settings(), engine=fake), spans).test_client()  # type: ignore[arg-type]
    fake.refusal = steering.Busy(1, retry_after=1.0)
    ask(client)
    fake.refusal, fake.script = None, (RuntimeError("broken"),)
    ask(client)
    refused, asked, failed = spans.get_finished_spans()
    assert (asked.attributes["error.type"], asked.status.is_ok) == ("internal_error", False)
    assert (refused.attributes["error.type"], refused.status.is_ok) == ("rate_limit_exceeded", True)
    assert (failed.attributes["error.type"], failed.status.is_ok) == ("internal_error", False)
    assert failed.parent is None


def test_lines_of_the_log_name_their_span(fake: FakeEngine, spans: object, caplog: pytest.LogCaptureFixture) -> None:
    client = traced(create_app(Settings(), engine=fake), spans).test_client()  # type: ignore[arg-type]
    with caplog.at_level("DEBUG", "helmsight"):
        ask(client)
    (line,) = [one.fields for one in caplog.records if getattr(one, "fields", {}).get("event") == "begun"]
    (span,) = [one for one in spans.get_finished_spans() if one.name.startswith("POST")]
    told = json.loads(span.to_json())["context"]
    assert (f"0x{line['trace_id']}", f"0x{line['span_id']}") == (told["trace_id"], told["span_id"])


def test_without_the_extra_it_is_said_what_to_install(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"pip install 'helmsight\[otel\]'"):
        create_app(Settings(traces=True), engine=fake)  # type: ignore[arg-type]
    assert create_app(Settings(), engine=fake)  # type: ignore[arg-type]


def imports_at_the_top(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_imported_that_is_not_switched_on() -> None:
    home = Path(server.__file__).parent
    for path in home.rglob("*.py"):
        for module in imports_at_the_top(ast.parse(path.read_text())):
            if path.name != "tracing.py":
                assert not module.startswith(("opentelemetry", "server.telemetry.tracing")), path


def test_who_sends_is_named_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from server.telemetry.tracing import resource

    assert resource().attributes["service.name"] == "helmsight"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,deployment.environment=prod")
    assert (resource().attributes["service.name"], resource().attributes["deployment.environment"]) == ("ours", "prod")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert resource().attributes["service.name"] == "mine"
