"""From a complete request to its answer, through WSGI."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Literal

from gunicorn.http import wsgi
from gunicorn.http.message import Request

from server.engine.resources import Pump
from server.http.connection import Connection
from server.http.intake import Refused, field
from server.http.streaming import AWAITED, BLOCKING, RESUME
from server.process import early_errors

log = logging.getLogger("helmsight")

Wait = Literal["awaits", "blocks"]


class Delivery:
    """The answer of a WSGI application to one request, from the complete request to the last byte.

    Errors end this request only. While the answer waits for its next piece it holds no thread: `pump` continues it if
    nothing blocks, and `blocking` runs a callable in a thread that may block. `keep` tells whether the connection may stay
    open; `done` receives at the end whether it still may. `access` is gunicorn's logger.
    """

    def __init__(
        self, app: Any, connection: Connection, request: Request, keep: bool, cfg: Any, access: Any, *,
        pump: Pump, blocking: Callable[[Callable[[], object]], object], done: Callable[[bool], object],
    ):  # fmt: skip
        self._app = app
        self._connection = connection
        self._request = request
        self._keep = keep
        self._cfg = cfg
        self._access = access
        self._pump = pump
        self._blocking = blocking
        self._done = done
        self._response: Any = None
        self._steps = self._answer()
        # Any thread that continues sees the context variables of the request's handlers.
        self._context = contextvars.Context()
        self._lock = threading.Lock()
        self._parked = self._news = False

    def go_on(self, may_block: bool = True) -> None:
        """Answer until the end or until there is nothing to send; one thread at a time."""
        while True:
            self._news = False
            wait = self._context.run(self._advance, may_block)
            if wait is None:
                return
            if wait == "blocks":
                self._blocking(self.go_on)
                return
            with self._lock:
                if not self._news:
                    self._parked = True
                    return

    def resume(self) -> None:
        """Continue the answer, since there may be more to send; any thread may call this."""
        with self._lock:
            self._news = True
            if not self._parked:
                return
            self._parked = False
        self._pump.run(self._go_on_unblocked)

    def _go_on_unblocked(self) -> None:
        self.go_on(may_block=False)

    def _advance(self, may_block: bool) -> Wait | None:
        """Send pieces and return the reason to pause, None at the end."""
        try:
            if not may_block and self._connection.lags:
                return "blocks"
            for wait in self._steps:
                if wait == "awaits" or not may_block:
                    return wait
        except OSError as error:  # the client is gone
            log.debug("an answer was cancelled: %s", error)
        except BaseException as error:  # a panic of a native library is no Exception
            log.error("a request could not be answered", exc_info=error)
            if self._response is None or not self._response.headers_sent:
                with contextlib.suppress(OSError):
                    request = self._request
                    answer = early_errors.answer(_BROKEN, self._app, request.path, partial(field, request))
                    self._connection.sendall(answer)
        self._done(self._keep)
        return None

    def _answer(self) -> Iterator[Wait]:
        connection, request, keep = self._connection, self._request, self._keep
        self._keep = False  # set again once the answer has ended well
        try:
            response, environ = wsgi.create(request, connection, connection.client, connection.server, self._cfg)
        except Exception:  # the request is unfit, for example its path is outside of SCRIPT_NAME
            fields = partial(field, request)
            connection.sendall(early_errors.refused(_UNFIT, self._app, connection.client, request.path, fields))
            return
        self._response = response
        environ["wsgi.multithread"] = True
        environ["gunicorn.socket"] = connection.sock
        environ[RESUME] = self.resume
        if not keep:
            response.force_close()
        started = datetime.now()
        pieces = self._app(environ, response.start_response)
        try:
            for piece in pieces:
                if piece is AWAITED:
                    yield "awaits"
                elif piece is BLOCKING:
                    yield "blocks"
                else:
                    response.write(piece)
            response.close()
            self._keep = not response.should_close()
        finally:
            try:
                if hasattr(pieces, "close"):
                    pieces.close()
            finally:  # closing has counted how much was sent of an answer that was given up
                self._access.access(response, request, environ, datetime.now() - started)


_UNFIT = Refused(400, "invalid_http", "The request cannot be answered: this server rejects its target or a header.")
_BROKEN = Refused(500, "internal_error", "The server had an unexpected error; it has been logged.")
