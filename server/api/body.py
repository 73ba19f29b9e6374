"""Reading a request's body within limits.

`server.process.worker` has received the whole body before a thread gets the request.
"""

from __future__ import annotations

import io

from flask import request

from server.context import AppContext
from server.errors import ApiError


def read_json(app: AppContext) -> bytes:
    """Return the body of a JSON request; raises a 415 or 413."""
    if not request.is_json:
        raise ApiError(
            415, "The body must be JSON: send 'Content-Type: application/json'.", code="unsupported_media_type"
        )
    return read_bytes(app.settings.max_body)


def read_bytes(limit: int) -> bytes:
    """Return the body; raises a 413 beyond `limit` bytes, whatever the limit of other routes."""
    if request.content_encoding not in (None, "", "identity"):
        raise ApiError(415, "The body must not be compressed.", code="unsupported_media_type")
    large = ApiError(
        413, f"The body is too large; at most {limit} bytes are allowed.", code="request_entity_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip
    if (request.content_length or 0) > limit:
        raise large
    request.max_content_length = limit + 1  # werkzeug silently drops the rest of a longer chunked body
    body = request.get_data(cache=False)
    if isinstance(source := request.environ["wsgi.input"], io.BytesIO):
        source.close()  # otherwise a second copy of the body would be kept until the answer ends
    if len(body) > limit:
        raise large
    return body
