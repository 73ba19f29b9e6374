"""Checks of Host and Origin, which keep foreign web pages from reading a server that needs no key.

A page whose own name resolves to the server's address (DNS rebinding) reads from it as from its own origin; only the name in
the request reveals it. An address cannot be rebound, so that Host may be any address, and probes work.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from flask import Flask, request

from server.errors import ApiError
from server.settings import Settings


class Hosts:
    """The names of one server: those of `allow_host`, its bound address, and `localhost`.

    If other machines can reach it, names without a dot (of the local network or of a container) count too, since no page of
    the internet can have one.
    """

    def __init__(self, settings: Settings):
        self._allowed = tuple(name.lower().rstrip(".") for name in settings.allow_host)
        self._bound = settings.host.lower().strip("[]")
        self._public = settings.public_bind
        self._pages = settings.cors_origin

    def allows_host(self, header: str) -> bool:
        """Return whether a request may name this host, with or without a port."""
        name = host_name(f"//{header}")
        if name is None:
            return False
        return is_address(name) or self._is_ours(name) or (self._public and "." not in name)

    def allows_origin(self, origin: str, host: str | None) -> bool:
        """Return whether a page of this origin may send a request to `host`.

        The server's own pages may, and those of `cors_origin`.
        """
        if origin in self._pages or "*" in self._pages:
            return True
        name = host_name(origin)
        if name is None:
            return False
        return self._is_ours(name) or (host is not None and name == host_name(f"//{host}"))

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", self._bound) or name.endswith(".localhost"):
            return True
        if is_address(name) and not self._public and ipaddress.ip_address(name).is_loopback:
            return True
        return any(
            allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
            for allowed in self._allowed
        )


def host_name(url: str) -> str | None:
    """Return the host of a URL in lower case, without a trailing dot; None if there is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for an invalid port
        host = parts.hostname
    except ValueError:
        return None
    if not host or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return host.rstrip(".")


def is_address(name: str) -> bool:
    """Return whether a name is an IP address in its usual form."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def register(app: Flask, settings: Settings) -> None:
    """Refuse other hosts and origins before every route.

    Not if a key is required, which such a page does not have, nor on a Unix socket, which no page reaches, unless names are
    configured.
    """
    if (settings.asks_for_key or settings.host.startswith("unix:")) and not settings.allow_host:
        return
    hosts = Hosts(settings)

    @app.before_request
    def check_host() -> None:
        host, origin = request.environ.get("HTTP_HOST"), request.headers.get("Origin")
        if host is not None and not hosts.allows_host(host):
            raise _refusal("host", host)
        if origin is not None and not hosts.allows_origin(origin, host):
            raise _refusal("origin", origin)


def _refusal(kind: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"This server does not answer requests with the {kind} {value[:128]!r}; start it with --allow-host NAME to add one.",
        code=f"{kind}_not_allowed",
    )
