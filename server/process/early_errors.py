"""Answers to requests that the application has not read.

Like all others they have an id and CORS headers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from server.access import cors
from server.error_forms import id_headers
from server.http.intake import Refused
from server.telemetry.logs import current, request_id

log = logging.getLogger("helmsight")

Field = Callable[[str], str | None]
"""Returns the value of a request's header field, None if it has none or it has not arrived."""


def refused(refusal: Refused, app: Any, client: Any, path: str, field: Field) -> bytes:
    """Return the answer to a refused request for a path, and log and count it."""
    fields = {"event": "refused", "status": refusal.status, "error": refusal.code}
    token = current.set(request_id(field("X-Request-Id")))
    try:
        client = client or "a local client"
        log.info("refused a request from %s: %d %s", client, refusal.status, refusal.code, extra={"fields": fields})
        app.extensions["helmsight"].metrics.unread(refusal.status, refusal.code)
        return answer(refusal, app, path, field)
    finally:
        current.reset(token)


def answer(refusal: Refused, app: Any, path: str, field: Field) -> bytes:
    """Return the answer to a request, with the request id that the log has."""
    named = current.get() or request_id(field("X-Request-Id"))
    settings = app.extensions["helmsight"].settings
    return refusal.response({**id_headers(path, named), **cors.headers(settings, field("Origin"))}, path)
