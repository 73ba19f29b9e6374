"""API keys as bearer tokens; without configured keys everything is open."""

from __future__ import annotations

from flask import Flask, Response, g, request

from server.access.limiter import Limiter
from server.access.named import Role
from server.access.ring import ANYONE, Holder, KeyRing
from server.error_forms import MESSAGES
from server.errors import ApiError
from server.http.intake import VECTORS

OPEN_ROUTES = ("/health", "/ready", "/", "/vectors", "/model", "/dashboard", "/docs", "/openapi.json")
OPEN_FOLDER = "/static/"
"""The folder that needs no key, like the open routes.

Load balancers probe without a key, the pages hold nothing but a field for the key, and the API document says nothing that
the source does not.
"""
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""The routes whose POST requests rate and concurrency limits apply to; others are cheap, and pages call many of them."""
ROWS_OF_ANSWER = "/v1/diagnostics/<identity>"
"""The route that shows a key without the role `journal` the rows of its own answers."""
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="helmsight"'}


def roles_for(rule: str, method: str) -> tuple[Role, ...]:
    """Return the roles of which a key needs at least one for a route."""
    if rule == ROWS_OF_ANSWER:
        return ("journal", "use")
    if rule == "/metrics" or rule.startswith("/v1/diagnostics"):
        return ("journal",)
    if rule.startswith(VECTORS):
        return ("vectors",) if method in ("POST", "DELETE") else ("use", "vectors")
    return ("use",)


def caller() -> Holder:
    """Return the holder of the current request's key."""
    current: Holder = g.get("holder", ANYONE)
    return current


def register(app: Flask, keys: KeyRing) -> None:
    """Require a key with a suitable role before every route but the open ones, and enforce its limits."""
    if not keys:
        return
    limiter = Limiter()

    @app.before_request
    def check_key() -> None:
        if request.path in OPEN_ROUTES or request.path.startswith(OPEN_FOLDER):
            return
        if request.method == "OPTIONS":  # a browser's preflight has no key, and its answer is no secret
            return
        g.holder = _holder(keys)
        _check_expiry(g.holder)
        if request.url_rule is None:
            return
        rule, needed = request.url_rule.rule, roles_for(request.url_rule.rule, request.method)
        if not g.holder.roles.intersection(needed):
            named = " or ".join(repr(role) for role in needed)
            raise ApiError(
                403, f"The key {g.holder.name!r} lacks the role {named}, which this needs.", code="missing_role"
            )
        if rule in CHATS and request.method == "POST":
            g.limited = True
            g.leave = limiter.enter(g.holder)

    @app.after_request
    def leave(response: Response) -> Response:
        if "leave" in g:
            if not response.is_streamed:
                g.leave()
            response.call_on_close(g.leave)  # also covers streams that were never read
        if "limited" in g:
            response.headers.update(limiter.headers(g.holder))
        return response


def _holder(keys: KeyRing) -> Holder:
    """Return the holder of the request's key, which may have expired; raises a 401 for an unknown one."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if not key.strip():
        scheme, key = "bearer", request.headers.get("x-api-key", "")  # as Anthropic's clients send it
    if scheme.lower() != "bearer" or not key.strip():
        other = "'x-api-key: KEY' or " if request.path.startswith(MESSAGES) else ""
        message = f"An API key is required: send it as {other}'Authorization: Bearer KEY'."
        raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
    holder = keys.holder(key.strip())
    if holder is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=_CHALLENGE)
    return holder


def _check_expiry(holder: Holder) -> None:
    """Raise a 401 if the key has expired."""
    if holder.expired:
        raise ApiError(
            401,
            f"The key {holder.name!r} expired at {holder.expires:%Y-%m-%d %H:%M} UTC.",
            code="expired_api_key",
            headers=_CHALLENGE,
        )
