"""Fetching an image from a public URL without becoming a door into the private network (`--allow-remote-images`).

The host is resolved once, every address must be public, and the connection goes to the checked address itself, so that
a name that resolves differently a moment later gains nothing. Redirects pass the same checks.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from http.client import HTTPException
from urllib.parse import urljoin, urlsplit

import urllib3

from server.errors import BadRequest

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HIDDEN = "its host is unknown or not public"
"""One text for both, so that nobody can ask which names the private network knows."""


def fetch(url: str, param: str, max_bytes: int, timeout: float) -> bytes:
    """The body behind `url`, at most `max_bytes` long, in at most `timeout` seconds; raises BadRequest."""
    deadline = time.monotonic() + timeout
    try:
        for _ in range(MAX_REDIRECTS + 1):
            response = _get(url, param, deadline)
            try:
                if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                    url = urljoin(url, location)
                    continue
                if response.status != 200:
                    raise _failed(param, f"the server answered with status {response.status}")
                return _read(response, param, max_bytes, deadline)
            finally:
                response.release_conn()
                response.close()
    except (urllib3.exceptions.HTTPError, HTTPException, OSError, ValueError) as error:
        raise _failed(param, type(error).__name__) from error
    raise _failed(param, f"more than {MAX_REDIRECTS} redirects")


def _get(url: str, param: str, deadline: float) -> urllib3.BaseHTTPResponse:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _failed(param, "the URL is malformed") from None
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.password:
        raise _failed(param, "only plain http(s) URLs are allowed")
    address = public_address(host, port or (443 if parts.scheme == "https" else 80), param)
    timeout = urllib3.Timeout(total=_left(deadline, param))
    pool: urllib3.HTTPConnectionPool
    if parts.scheme == "https":
        pool = urllib3.HTTPSConnectionPool(
            address, port or 443, server_hostname=host, assert_hostname=host, ssl_context=ssl.create_default_context()
        )
    else:
        pool = urllib3.HTTPConnectionPool(address, port or 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {"Host": parts.netloc, "Accept": "image/*", "User-Agent": "helmsight"}
    return pool.urlopen(
        "GET", path, headers=headers, timeout=timeout, redirect=False, retries=False, preload_content=False
    )


def _read(response: urllib3.BaseHTTPResponse, param: str, max_bytes: int, deadline: float) -> bytes:
    data = bytearray()
    while piece := response.read1(65_536, decode_content=False):  # as it comes: a slow drip must meet the deadline
        data += piece
        if len(data) > max_bytes:
            raise BadRequest(f"'{param}' may hold at most {max_bytes} bytes.", param, "image_too_large")
        _left(deadline, param)
    return bytes(data)


def public_address(host: str, port: int, param: str) -> str:
    """One address of `host`; raises BadRequest unless all of its addresses are public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _failed(param, _HIDDEN) from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise _failed(param, _HIDDEN)
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is globally reachable, also when it wraps an IPv4 address in an IPv6 one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _left(deadline: float, param: str) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise _failed(param, "it took too long")
    return seconds


def _failed(param: str, why: str) -> BadRequest:
    return BadRequest(f"'{param}': the image could not be fetched: {why}.", param, "image_fetch_failed")
