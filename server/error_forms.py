"""The form of an error: OpenAI's, or Anthropic's below its routes."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

MESSAGES = "/v1/messages"
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The type of an error in Anthropic's form by its status, besides `api_error` and `invalid_request_error`."""


def is_anthropic(path: str) -> bool:
    """Return whether a path is Anthropic's; a prefix of the server, or a wrong one of the client, does not matter."""
    return f"{MESSAGES}/" in f"{unquote(path)}/"


def anthropic(error: dict[str, Any], status: int, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, with the field and the code of OpenAI's `error`."""
    kind = ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    fields = {"type": kind, "message": error["message"], "param": error["param"], "code": error["code"]}
    return {"type": "error", "error": fields, "request_id": request_id}


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """Return the headers with a request's id."""
    return {"X-Request-Id": request_id, **({"request-id": request_id} if is_anthropic(path) else {})}
