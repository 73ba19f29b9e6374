"""Errors of the server, sent as an OpenAI error object: {"error": {"message", "type", "param", "code"}}.

Below Anthropic's routes they have its form.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from server.encode import json_response
from server.error_forms import anthropic, is_anthropic
from steering import Busy, Fault, OutOfRoom, RequestError, SteeringError

log = logging.getLogger("helmsight")

CLIENT_CLOSED = 499
"""Status of a request whose client left; nobody reads it, but the metrics count it."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    CLIENT_CLOSED: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


_CHATS = "send 'messages' to POST /v1/chat/completions"
_INSTEAD = {
    "/v1/completions": f"Completions of a bare prompt are not served; {_CHATS}.",
    "/v1/embeddings": "Embeddings are not served; use a server that has an embedding model.",
}
"""Routes of other servers, and the alternatives to them."""


class ApiError(Exception):
    """An error with the status and fields that the client receives; `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """A 400 that names the field."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """Return the ApiError for any exception; unexpected ones are logged here and reveal no internals."""
    match error:
        case ApiError():
            return error
        case OutOfRoom():
            return ApiError(429, str(error), param=error.param, code=error.code, retry_after=error.retry_after)
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case Busy():
            return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
        case Fault():
            log.error("generation failed: %s", error)
            return ApiError(500, f"The generation of this answer failed: {error}", code="generation_failed")
        case SteeringError():
            log.error("engine error: %s", error)
            return ApiError(500, str(error), code="engine_error")
        case HTTPException():
            return _from_werkzeug(error)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "The server had an unexpected error; it has been logged.", code="internal_error")


def _from_werkzeug(error: HTTPException) -> ApiError:
    status = error.code or 500
    message = error.description or error.name
    code = error.name.lower().replace(" ", "_")
    if status == 404:
        message, code = _no_route(request.path), "unknown_route"
    elif status == 413:
        message = f"The body is too large; at most {current_app.config['MAX_CONTENT_LENGTH'] - 1} bytes are allowed."
    elif status == 405:
        message = "This method is not allowed here."
    headers = {name: value for name, value in error.get_headers() if name in ("Allow", "Retry-After")}
    return ApiError(status, message, code=code, headers=headers)


def _no_route(path: str) -> str:
    """Return the message for an unknown route."""
    path = path.rstrip("/")
    if path.endswith("/chat/completions"):
        return (
            "There is no such route; chats go to /v1/chat/completions, so that a client's base URL ends with one /v1."
        )
    for route in ("/responses", "/messages"):
        if path.endswith(route):
            return (
                f"There is no such route; such requests go to POST /v1{route}: a client's base URL has one /v1 at most."
            )
    return _INSTEAD.get(path.replace("/v1/v1/", "/v1/"), "There is no such route.")


def error_response(error: Exception) -> Response:
    """Return the HTTP response for an exception."""
    problem = to_api_error(error)
    g.error_code = problem.code or "none"
    body = problem.body()
    if is_anthropic(request.path):
        body = anthropic(body["error"], problem.status, g.get("request_id"))
    return json_response(body, problem.status, problem.headers)


def register(app: Flask) -> None:
    """Answer every exception of any route, and unknown routes, with `error_response`."""
    app.register_error_handler(Exception, error_response)
