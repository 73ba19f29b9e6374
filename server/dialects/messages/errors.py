"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from flask import Response, g

from server.encode import json_response
from server.errors import ApiError, to_api_error

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(problem: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error, with the field and the code that OpenAI's has."""
    kind = _TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": problem.message, "param": problem.param, "code": problem.code}
    return {"type": "error", "error": error, "request_id": request_id}


def error_response(error: Exception) -> Response:
    """Return the HTTP response for an exception."""
    problem = to_api_error(error)
    g.error_code = problem.code or "none"
    return json_response(error_body(problem, g.get("request_id")), problem.status, problem.headers)
