"""Cross-origin requests (CORS) from web pages of the configured origins; none by default."""

from __future__ import annotations

from flask import Flask, Response
from flask_cors import CORS

from server.settings import Settings

SHOWN = ("X-Request-Id", "Retry-After")
"""Headers that a page may read besides the always readable ones."""


def register(app: Flask, settings: Settings) -> None:
    """Add the CORS headers to every answer to such a page, including errors and streams, and answer preflights.

    A page may do what its key allows. Cookies have no meaning here and are not requested.
    """
    if settings.cors_origin:
        CORS(app, origins=list(settings.cors_origin), send_wildcard=True, expose_headers=list(SHOWN), max_age=600)
        if "*" not in settings.cors_origin:
            app.after_request(_varying)


def headers(settings: Settings, origin: str | None) -> dict[str, str]:
    """Return the CORS headers of an answer made outside of the application, for a page of this origin."""
    if not settings.cors_origin:
        return {}
    anyone = "*" in settings.cors_origin
    cors_headers = {} if anyone else {"Vary": "Origin"}
    if origin is not None and (anyone or origin.lower() in settings.cors_origin):
        cors_headers |= {
            "Access-Control-Allow-Origin": "*" if anyone else origin,
            "Access-Control-Expose-Headers": ", ".join(SHOWN),
        }
    return cors_headers


def _varying(response: Response) -> Response:
    """Mark answers as varying by origin, so that a cache does not reuse them for other origins."""
    response.vary.add("Origin")
    return response
