"""Scores where people look: read from an OTLP collector, and from score endpoints, which the test runs itself."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from flask.testing import FlaskClient

from server.cli import main
from server.telemetry.conventions import EVALUATION, explanations
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Serve, journal_of, rows_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DIAGNOSTICS = {
    "modality": {"attention_ratio": 0.25, "image_share": None, "context_share": None},
    "flags": {"perceptual_blindness": True, "dissociation": None},
    "decay": {"slope": -0.5},
}


class Collector:
    """An HTTP server that keeps every body by its path, with the authorization that came with it."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, str | None, bytes]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                collector.posts.append((self.path, self.headers.get("Authorization"), body))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def of(self, path: str) -> list[bytes]:
        return [body for where, _, body in self.posts if where == path]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def attributes(message: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(item) for item in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in message.attributes}


def flush(client: FlaskClient) -> None:
    client.application.extensions["helmsight"].traces.close()


@pytest.fixture
def traced(
    fake: FakeEngine,
    serve: Serve,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FlaskClient]:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    fake.diagnostics = DIAGNOSTICS
    client = serve(fake, traces=True)
    yield client
    flush(client)


def chat(client: FlaskClient) -> str:
    head = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"messages": [{"role": "user", "content": "secret words"}], "store": True, "temperature": 0.5, "seed": 7}
    answer = client.post("/v1/chat/completions", json=body, headers=head, buffered=True)
    assert answer.status_code == 200
    return str(answer.json["id"])


def test_a_collector_gets_spans_and_evaluation_events(traced: FlaskClient, collector: Collector) -> None:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    identity = chat(traced)
    changed = traced.post(f"/v1/chat/completions/{identity}", json={"metadata": {"answer_correct": "false"}})
    assert changed.status_code == 200
    flush(traced)
    spans = [
        span
        for body in collector.of("/v1/traces")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (asked,) = [span for span in spans if span.name == "chat fake"]
    assert (asked.trace_id.hex(), asked.kind) == (TRACE, 1), "internal: the model runs in this process"
    found = attributes(asked)
    assert found.items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "helmsight", "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake", "gen_ai.response.id": identity, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2,
        "helmsight.readout.attention_ratio": 0.25, "helmsight.readout.perceptual_blindness": True,
        "helmsight.readout.decay_slope": -0.5,
    }.items()  # fmt: skip
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert "helmsight.readout.dissociation" not in found

    events = [
        record
        for body in collector.of("/v1/logs")
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]
    assert {event.event_name for event in events} == {EVALUATION} == {"gen_ai.evaluation.result"}
    assert {(event.trace_id, event.span_id) for event in events} == {(asked.trace_id, asked.span_id)}
    told = {one["gen_ai.evaluation.name"]: one for one in map(attributes, events)}
    assert told.keys() == {"attention_ratio", "perceptual_blindness", "decay_slope", "answer_correct"}
    assert {one["gen_ai.response.id"] for one in told.values()} == {identity}
    score = "gen_ai.evaluation.score"
    assert {name: (one[f"{score}.value"], one.get(f"{score}.label")) for name, one in told.items()} == {
        "attention_ratio": (0.25, None), "decay_slope": (-0.5, None), "perceptual_blindness": (1.0, "true"),
        "answer_correct": (0.0, "false"),
    }  # fmt: skip
    assert all(one["gen_ai.evaluation.explanation"] for one in told.values())
    assert not any(b"secret" in body for _, _, body in collector.posts)
    (row,) = rows_of(traced, 1)
    assert (row["trace_id"], row["span_id"]) == (TRACE, asked.span_id.hex())


def test_a_number_of_an_image_is_not_called_a_flag() -> None:
    about = explanations()
    assert about["focused_image"] == about["target_image"] == "Number of the readout focus"
    assert about["correct"] == "Flag of the readout focus"


def test_a_tool_that_takes_no_logs_gets_none(
    traced: FlaskClient,
    collector: Collector,
    fake: FakeEngine,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    client = serve(fake, traces=True)
    chat(client)
    flush(client)
    assert collector.of("/v1/traces")
    assert not collector.of("/v1/logs")


@pytest.mark.parametrize("tool", ["langfuse", "phoenix"])
def test_a_score_endpoint_gets_each_number_and_the_truth_that_came_later(
    tool: str,
    traced: FlaskClient,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("LANGFUSE_PUBLIC_KEY", "pk"), ("LANGFUSE_SECRET_KEY", "sk"), ("PHOENIX_API_KEY", "px")):
        monkeypatch.setenv(name, value)
    identity = chat(traced)
    traced.post(f"/v1/chat/completions/{identity}", json={"metadata": {"answer_correct": "true"}})
    command = ["journal", "scores", "--to", tool, "--url", collector.url, "--journal", journal_of(traced)._setting]
    assert main(command) == 0
    assert "4 scores sent" in capsys.readouterr().out
    (row,) = rows_of(traced, 1)
    if tool == "langfuse":
        bodies = [json.loads(body) for body in collector.of("/api/public/scores")]
        assert {auth for path, auth, _ in collector.posts if path == "/api/public/scores"} == {"Basic cGs6c2s="}
        assert {(one["traceId"], one["observationId"]) for one in bodies} == {(TRACE, row["span_id"])}
        assert {one["name"]: (one["value"], one["dataType"]) for one in bodies} == {
            "attention_ratio": (0.25, "NUMERIC"), "decay_slope": (-0.5, "NUMERIC"),
            "perceptual_blindness": (1.0, "BOOLEAN"), "answer_correct": (1.0, "BOOLEAN"),
        }  # fmt: skip
        names = {one["id"] for one in bodies}
    else:
        (body,) = collector.of("/v1/span_annotations")
        annotations = json.loads(body)["data"]
        assert {auth for path, auth, _ in collector.posts if path == "/v1/span_annotations"} == {"Bearer px"}
        assert {one["span_id"] for one in annotations} == {row["span_id"]}
        results = [(one["name"], one["annotator_kind"], one["result"]) for one in annotations]
        assert {name: (kind, one["score"], one.get("label")) for name, kind, one in results} == {
            "attention_ratio": ("CODE", 0.25, None), "decay_slope": ("CODE", -0.5, None),
            "perceptual_blindness": ("CODE", 1.0, "true"), "answer_correct": ("HUMAN", 1.0, "true"),
        }  # fmt: skip
        names = {one["identifier"] for one in annotations}
    sent = ("attention_ratio", "decay_slope", "perceptual_blindness", "answer_correct")
    assert names == {f"{identity}-0-{name}" for name in sent}
    collector.status = 401
    assert main(command) == 1
    assert "answered 401" in capsys.readouterr().err


def test_rows_without_a_trace_are_counted(
    fake: FakeEngine,
    serve: Serve,
    collector: Collector,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = serve(fake)
    ask(client)
    rows_of(client, 1)
    setting = journal_of(client)._setting
    assert main(["journal", "scores", "--to", "phoenix", "--url", collector.url, "--journal", setting]) == 0
    assert capsys.readouterr().out == "0 scores sent; 1 rows without a trace were left out\n"
    assert not collector.posts
