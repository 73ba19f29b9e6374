"""Operational routes: health, readiness, metrics and the API document."""

from __future__ import annotations

from flask import Blueprint, Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST

from server.context import context
from server.encode import json_response
from server.openapi.document import document
from server.openapi.operation import JSON, TEXT, documented
from server.wire.sent.catalog import Health, Readiness

blueprint = Blueprint("operations", __name__)


@blueprint.get("/health")
@documented("Operations", {200: {JSON: Health}, 503: {JSON: Health}})
def health() -> Response:
    """Report whether the process is worth keeping: 200 while loading, serving or draining; 503 once its engine has died."""
    state = context().runtime.state
    status = 503 if state == "failed" else 200
    return json_response({"status": "failed" if status == 503 else "ok"}, status)


@blueprint.get("/ready")
@documented("Operations", {200: {JSON: Readiness}, 503: {JSON: Readiness}})
def ready() -> Response:
    """Report whether requests are served: 200, else 503 with the state (loading, with `progress`, draining or failed).

    The journal's state is reported too and does not change the status, since answers need no journal.
    """
    app = context()
    state = app.runtime.state
    headers = {} if state == "ready" else {"Retry-After": "2"}
    readiness = {"status": state, "journal": app.journal.status()}
    if state == "loading":
        readiness["progress"] = app.runtime.progress_json()
    return json_response(readiness, 200 if state == "ready" else 503, headers)


@blueprint.get("/metrics")
@documented("Operations", {200: {"text/plain": TEXT}})
def metrics() -> Response:
    """Return counters, gauges and histograms in Prometheus' text format."""
    return Response(context().metrics.exposition(), content_type=CONTENT_TYPE_LATEST)


@blueprint.get("/openapi.json")
@documented("Operations", {200: {JSON: {"type": "object"}}})
def openapi() -> Response:
    """Return this document, which lists the registered interventions and readouts and needs no model."""
    return json_response(document(current_app, context()))
