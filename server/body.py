"""Reading a request's body, bounded in bytes and in time."""

from __future__ import annotations

import socket

from flask import request
from gunicorn.http.errors import ParseException

from server.context import AppContext
from server.errors import ApiError
from server.watcher import client_socket


def read_json(app: AppContext) -> bytes:
    """The body of a request in JSON."""
    if not request.is_json:
        raise ApiError(
            415, "The body must be JSON: send 'Content-Type: application/json'.", code="unsupported_media_type"
        )
    return read_bytes(app, app.settings.max_body)


def read_bytes(app: AppContext, limit: int) -> bytes:
    """The body, of at most `limit` bytes whatever the limit for other routes; a client that dribbles it is cut off."""
    if request.content_encoding not in (None, "", "identity"):
        raise ApiError(415, "The body must not be compressed.", code="unsupported_media_type")
    large = ApiError(
        413, f"The body is too large; at most {limit} bytes are allowed.", code="request_entity_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip
    if (request.content_length or 0) > limit:
        raise large
    request.max_content_length = limit + 1  # werkzeug silently drops what a chunked body has beyond it
    connection = client_socket(request.environ)

    def cut_off() -> None:
        if connection is not None:
            connection.shutdown(socket.SHUT_RD)

    late = ApiError(408, "The body did not arrive in time.", code="body_timeout", headers={"Connection": "close"})
    with app.watcher.watching(None, app.settings.read_timeout, cut_off) as watch:
        try:
            body = request.get_data(cache=False)
        except ParseException as error:
            raise ApiError(400, f"The body could not be read: {error}.", code="invalid_body") from None
        except TimeoutError:
            raise late from None
        except Exception:
            if watch.outcome == "late":
                raise late from None
            raise
    if len(body) > limit:
        raise large
    return body
