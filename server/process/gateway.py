"""From a request that is whole to its answer, through WSGI."""

from __future__ import annotations

import contextlib
import logging
from datetime import datetime
from typing import Any

from gunicorn.http import wsgi
from gunicorn.http.message import Request

from server.process.connection import Connection
from server.process.intake import Refused

log = logging.getLogger("helmsight")


def answer(app: Any, connection: Connection, request: Request, keep: bool, cfg: Any, access: Any) -> bool:
    """Have a WSGI application answer a request, and gunicorn's logger `access` write it down; whatever is raised ends this
    request alone. `keep` says whether the connection may stay open, and so does what is returned."""
    response = None
    try:
        try:
            response, environ = wsgi.create(request, connection, connection.client, connection.server, cfg)
        except Exception as error:  # of what the request says: a path outside of a SCRIPT_NAME, for one
            log.info("refused a request from %s: 400 %s", connection.client or "a local client", type(error).__name__)
            connection.sendall(_UNFIT.response())
            return False
        environ["wsgi.multithread"] = True
        environ["gunicorn.socket"] = connection.sock
        if not keep:
            response.force_close()
        _respond(app, request, response, environ, access)
        return not response.should_close()
    except OSError as error:  # the client is gone
        log.debug("an answer was given up: %s", error)
    except BaseException as error:  # a panic of a native library is no Exception
        log.error("a request could not be answered", exc_info=error)
        if response is None or not response.headers_sent:
            with contextlib.suppress(OSError):
                connection.sendall(_BROKEN.response())
    return False


def _respond(app: Any, request: Request, response: wsgi.Response, environ: dict[str, Any], access: Any) -> None:
    started = datetime.now()
    pieces = app(environ, response.start_response)
    try:
        for piece in pieces:
            response.write(piece)
        response.close()
    finally:
        try:
            if hasattr(pieces, "close"):
                pieces.close()
        finally:  # of an answer that was given up it is known now how far it came
            access.access(response, request, environ, datetime.now() - started)


_UNFIT = Refused(
    400, "invalid_http", "The request cannot be answered: its target or its header does not fit this server."
)
_BROKEN = Refused(500, "internal_error", "The server had an unexpected error; it has been logged.")
