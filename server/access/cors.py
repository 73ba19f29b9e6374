"""Which web pages elsewhere may call the API from a browser (CORS): those of the origins that are set, by default none."""

from __future__ import annotations

from flask import Flask, Response
from flask_cors import CORS

from server.settings import Settings

SHOWN = ("X-Request-Id", "Retry-After")
"""Headers that a page may read besides those that it always may."""


def register(app: Flask, settings: Settings) -> None:
    """Add the headers to every answer to such a page, errors and streams among them, and answer its preflights. What a page
    may do is what its key allows: cookies mean nothing here, and are not asked for."""
    if settings.cors_origin:
        CORS(app, origins=list(settings.cors_origin), send_wildcard=True, expose_headers=list(SHOWN), max_age=600)
        if "*" not in settings.cors_origin:
            app.after_request(_varying)


def headers(settings: Settings, origin: str | None) -> dict[str, str]:
    """The same for an answer that the application does not make, to a request of a page of this origin."""
    if not settings.cors_origin:
        return {}
    anyone = "*" in settings.cors_origin
    found = {} if anyone else {"Vary": "Origin"}
    if origin is not None and (anyone or origin.lower() in settings.cors_origin):
        found |= {
            "Access-Control-Allow-Origin": "*" if anyone else origin,
            "Access-Control-Expose-Headers": ", ".join(SHOWN),
        }
    return found


def _varying(response: Response) -> Response:
    """Also what another page, or none, is told must not be told to one of the origins by a cache between."""
    response.vary.add("Origin")
    return response
