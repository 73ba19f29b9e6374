"""For those who run the server: does the process live, does it serve, and in numbers how."""

from __future__ import annotations

from flask import Blueprint, Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST

from server.context import context
from server.encode import json_response
from server.openapi.document import document
from server.openapi.operation import JSON, TEXT, documented
from server.wire.catalog import Health, Readiness

blueprint = Blueprint("operations", __name__)


@blueprint.get("/health")
@documented("Operations", {200: {JSON: Health}, 503: {JSON: Health}})
def health() -> Response:
    """200 while the process is worth keeping: loading, serving or draining; 503 once its engine has died."""
    state = context().runtime.state
    status = 503 if state == "failed" else 200
    return json_response({"status": "failed" if status == 503 else "ok"}, status)


@blueprint.get("/ready")
@documented("Operations", {200: {JSON: Readiness}, 503: {JSON: Readiness}})
def ready() -> Response:
    """200 while requests are served, else 503 with the state: loading, with its `progress`, draining or failed.

    The journal's state stands beside it and does not change it: answers need no journal.
    """
    app = context()
    state = app.runtime.state
    headers = {} if state == "ready" else {"Retry-After": "2"}
    said = {"status": state, "journal": app.journal.status()}
    if state == "loading":
        said["progress"] = app.runtime.progress.said()
    return json_response(said, 200 if state == "ready" else 503, headers)


@blueprint.get("/metrics")
@documented("Operations", {200: {"text/plain": TEXT}})
def metrics() -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    return Response(context().metrics.exposition(), content_type=CONTENT_TYPE_LATEST)


@blueprint.get("/openapi.json")
@documented("Operations", {200: {JSON: {"type": "object"}}})
def openapi() -> Response:
    """This document. It needs no model, and tells of the interventions and readouts that are registered."""
    return json_response(document(current_app, context()))
