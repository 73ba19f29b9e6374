"""Which Host and Origin a request may name: what keeps a web page elsewhere from reading a server that needs no key.

A page whose own name is made to resolve to the server's address (DNS rebinding) reads from it as from its own origin; only
the name in the request gives it away. An address cannot be rebound, so Host may be any address, and probes go on to work.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from flask import Flask, request

from server.errors import ApiError
from server.settings import Settings


class Hosts:
    """The names that stand for one server: those of `allow_host`, what it is bound to, and `localhost`.

    Where other machines may reach it, also names without a dot (of the local network or of a container), which no page of
    the internet can have.
    """

    def __init__(self, settings: Settings):
        self._allowed = tuple(name.lower().rstrip(".") for name in settings.allow_host)
        self._bound = settings.host.lower().strip("[]")
        self._public = settings.public_bind
        self._pages = settings.cors_origin

    def allows_host(self, header: str) -> bool:
        """Whether a request may name this host, with or without a port."""
        name = host_name(f"//{header}")
        if name is None:
            return False
        return is_address(name) or self._is_ours(name) or (self._public and "." not in name)

    def allows_origin(self, origin: str, host: str | None) -> bool:
        """Whether a page of this origin may ask, in a request to `host`: the server's own pages may, and those of
        `cors_origin`."""
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
    """The host of a URL in lower case, without a dot at its end; None where there is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # a wrong one raises
        found = parts.hostname
    except ValueError:
        return None
    if not found or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return found.rstrip(".")


def is_address(name: str) -> bool:
    """Whether it is an IP address in its usual form."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def register(app: Flask, settings: Settings) -> None:
    """Refuse other hosts and origins before every route.

    Not where a key is needed, which such a page does not have, nor on a Unix socket, which no page reaches; there only
    when names were stated.
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
