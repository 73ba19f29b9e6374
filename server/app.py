"""The Flask application: `create_app` assembles routes, errors, keys and metrics."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING

from flask import Flask, Request, Response, g, request

from server import errors
from server.access import auth, cors, hosts
from server.access.ring import KeyRing
from server.api import catalog, operations, states, stored, truths
from server.api import journal as journal_routes
from server.api.chats import chat, messages, responses
from server.context import AppContext, context
from server.engine.local import Servable, adapted
from server.engine.runtime import Runtime, Serving
from server.error_forms import id_headers
from server.http.watcher import Watcher
from server.journal.words import with_numbers
from server.journal.writer import Journal
from server.requests.presets import Presets
from server.requests.readiness import log_missing
from server.settings import Settings, SettingsError
from server.telemetry.logs import NOTES, current, current_completion, request_id, trace_of
from server.telemetry.metrics import Metrics
from server.web import page
from server.wire.chat import ChatRequest, with_interventions
from steering.protocol import intervention

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from server.telemetry.tracing import Traces

log = logging.getLogger("helmsight")

_OF_JOURNAL = (journal_routes.blueprint.name, truths.blueprint.name)
"""Routes that read and mark rows: whoever mistypes a query was refused no answer."""


def create_app(
    settings: Settings | None = None,
    engine: Servable | None = None,
    runtime: Runtime | None = None,
) -> Flask:
    """Return the WSGI application.

    With a started `engine` it serves at once; with a `runtime` it serves the model that this loads; with neither, the model
    of the settings is loaded in the background.
    """
    settings = settings or Settings()
    presets = check_names(settings)
    loads = runtime is None and engine is None
    if runtime is None:
        runtime = Runtime(settings, None if engine is None else Serving.of(adapted(engine), settings))
    app = Flask("helmsight", static_folder=None)
    app.wsgi_app = partial(_not_upgraded, app.wsgi_app)  # type: ignore[method-assign]
    # One byte more than allowed, since werkzeug silently cuts a chunked body at its limit: only thus can a body that is
    # too long be told from one that was cut.
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body + 1
    app.url_map.strict_slashes = app.url_map.merge_slashes = False  # no redirects: this is an API
    if runtime.loaded is None:
        runtime.checks += [partial(presets.check, settings=settings), partial(log_missing, settings=settings)]
    else:
        presets.check(runtime.loaded, settings)
        log_missing(runtime.loaded, settings)
    if loads:
        runtime.start()
    journal = open_journal(settings)
    traces = open_traces(settings)
    keys = KeyRing(settings.keys, settings.named_key_file)
    metrics = Metrics(runtime, journal, settings.journal_readouts, keys.expiries)
    state = AppContext(settings, runtime, metrics, Watcher(), journal, presets, traces)
    app.extensions["helmsight"] = state
    if journal.enabled:
        journal.pruned = state.pictures.sweep
    errors.register(app)
    cors.register(app, settings)
    app.before_request(_begin)
    hosts.register(app, settings)
    auth.register(app, keys)
    for module in (chat, responses, messages, stored, states, catalog, operations, page, journal_routes, truths):
        app.register_blueprint(module.blueprint)
    app.after_request(_finish)
    return app


def check_names(settings: Settings) -> Presets:
    """Return the presets of the settings; raises SettingsError for a name of theirs that does not exist.

    A misspelt intervention would stay allowed, and a readout without numbers would leave none in the journal.
    """
    if unknown := [name for name in settings.disable_interventions if name not in intervention.REGISTRY]:
        raise SettingsError(f"setting 'disable_interventions': {_meant(unknown[0], intervention.REGISTRY)}")
    allowed = with_numbers()
    if unknown := [name for name in settings.journal_readouts if name not in allowed]:
        raise SettingsError(f"setting 'journal_readouts', readouts that have numbers: {_meant(unknown[0], allowed)}")
    return Presets.of(settings, with_interventions(ChatRequest))


def _meant(unknown: str, known: Collection[str]) -> str:
    """Return in words what a name may be that is unknown."""
    close = get_close_matches(unknown, known, n=1)
    meant = f"did you mean {close[0]!r}?" if close else f"must be one of {', '.join(known)}."
    return f"{unknown[:64]!r} is unknown; {meant}"


def _not_upgraded(app: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """Ignore an unsupported `Upgrade` header (RFC 9110, section 7.8), since Werkzeug would refuse websocket upgrades."""
    environ.pop("HTTP_UPGRADE", None)
    return app(environ, start_response)


def open_journal(settings: Settings) -> Journal:
    """Return the running journal of the settings; pending rows are written when the process ends."""
    journal = Journal(
        settings.journal.get_secret_value(),
        max_rows=settings.journal_max_rows,
        days=settings.journal_days,
        text_limit=settings.journal_text_limit if settings.journal_texts else 0,
    )
    if journal.enabled:
        journal.start()
        # Not at the end of draining, when answers are still being sent. At exit the threads that send them have ended.
        atexit.register(journal.close)
    return journal


def open_traces(settings: Settings) -> Traces | None:
    """Return traces if they are switched on; raises SettingsError without OpenTelemetry."""
    if not settings.traces:
        return None
    try:
        from server.telemetry.tracing import Traces  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise SettingsError(f"setting 'traces': {error.name} is missing: pip install 'helmsight[otel]'") from error
    return Traces.sent()


def _begin() -> None:
    """Set the request's id and start its clock."""
    g.started = time.monotonic()
    g.request_id = request_id(request.headers.get("X-Request-Id"))
    current.set(g.request_id)
    current_completion.set(None)
    g.notes = request.environ[NOTES] = {"request_id": g.request_id, "route": grouped(request)}
    traces = context().traces
    g.notes |= trace_of(request.headers.get("traceparent"))
    if traces is not None and request.path.startswith("/v1/"):  # probes each second are not traced
        g.span = traces.begun(request.method, g.notes["route"], dict(request.headers))
        g.notes |= traces.ids(g.span)
    log.debug("begun: %s %s", request.method, request.path, extra={"fields": {"event": "begun", **g.notes}})


def grouped(request: Request) -> str:
    """Return the route of a request for metrics and logs.

    It is the rule, not the path, since clients could create any number of time series by paths; pages and their files are
    grouped, since nobody needs one series for each.
    """
    if request.url_rule is None:
        return "unknown"
    return "pages" if request.blueprint == page.blueprint.name else request.url_rule.rule


def _finish(response: Response) -> Response:
    """Count the request when its last byte is handed over, which for a stream is long after its status."""
    response.headers.update(id_headers(request.path, g.request_id))
    response.headers["X-Content-Type-Options"] = "nosniff"
    metrics, started, route = context().metrics, g.started, g.notes["route"]
    method = request.method if request.method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
    code = g.get("error_code")
    if code is not None:
        g.notes["error"] = code
        metrics.refused(response.status_code, code)

    notes, traces, span, chat_span = g.notes, context().traces, g.get("span"), g.get("chat_span")
    if (name := auth.caller().name) is not None:
        notes["key_name"] = name

    def count() -> None:
        if traces is not None and span is not None:
            traces.ended(span, response.status_code, notes, chat_span)
        if name is not None:
            metrics.of_keys.labels(name, str(response.status_code)).inc()
        metrics.requests.labels(route, method, str(response.status_code)).inc()
        metrics.latency.labels(route).observe(time.monotonic() - started)
        current.set(None)
        current_completion.set(None)

    response.call_on_close(count)
    served = request.blueprint not in _OF_JOURNAL and not g.get("leaves_rows")
    if code is not None and served and response.status_code != errors.CLIENT_CLOSED:
        context().journal.refuse(response.status_code, code, route)
    return response
