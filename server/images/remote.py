"""Fetching an image from a public URL without exposing the private network (`--allow-remote-images`).

The host is resolved once, every address must be public, and the connection goes to the checked address itself, so that a
name that resolves differently a moment later gains nothing. Redirects pass the same checks. One deadline bounds everything:
resolving, connecting, TLS, the head and the body, however slowly they arrive.
"""

from __future__ import annotations

import io
import ipaddress
import queue
import socket
import ssl
import threading
import time
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from server.errors import BadRequest

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HIDDEN = "its host is unknown or not public"
"""The same text for both cases, so that nobody can find out which names the private network knows."""

# Networks that ipaddress's is_global wrongly includes in this or an older version of Python.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # relays of 6to4
            "2001::/23",  # protocol assignments; Teredo addresses are unwrapped before
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)
_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def fetch(url: str, param: str, max_bytes: int, timeout: float) -> bytes:
    """Return the body of `url`, at most `max_bytes` long, within `timeout` seconds; raises BadRequest."""
    deadline = time.monotonic() + timeout
    try:
        for _ in range(MAX_REDIRECTS + 1):
            with _get(url, param, deadline) as response:
                if response.status in _REDIRECTS and (location := response.getheader("Location")):
                    url = urljoin(url, location)
                    continue
                if response.status != 200:
                    raise _failed(param, f"the server answered with status {response.status}")
                return _read(response, param, max_bytes)
    except TimeoutError:
        raise _failed(param, "it took too long") from None
    except (HTTPException, OSError, ValueError) as error:
        raise _failed(param, type(error).__name__) from error
    raise _failed(param, f"more than {MAX_REDIRECTS} redirects")


def _get(url: str, param: str, deadline: float) -> HTTPResponse:
    """Return the answer to one request, with its head read; closing it closes the connection."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _failed(param, "the URL is malformed") from None
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.password:
        raise _failed(param, "only plain http(s) URLs are allowed")
    port = port or (443 if parts.scheme == "https" else 80)
    address = public_address(host, port, param, _seconds_left(deadline))
    sock = socket.create_connection((address, port), timeout=_seconds_left(deadline))
    try:
        if parts.scheme == "https":
            sock.settimeout(_seconds_left(deadline))
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        # Characters that HTTP does not allow are escaped, so that none of them can start a line.
        path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe="!#$%&'()*+,/:;=?@[]~")
        netloc = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii").decode()
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: {netloc}",
            "Accept: image/*",
            "User-Agent: helmsight",
            "Connection: close",
        )
        sock.settimeout(_seconds_left(deadline))
        sock.sendall("\r\n".join((*lines, "", "")).encode("ascii"))
        response = HTTPResponse(_Timed(sock, deadline), method="GET")  # type: ignore[arg-type]
        response.begin()
    except BaseException:
        sock.close()
        raise
    return response


class _Timed(io.RawIOBase):
    """A socket with a deadline for reads; HTTPResponse accepts it as a socket and makes a file of it."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._sock = sock
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_seconds_left(self._deadline))
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._sock.close()
        super().close()


def _read(response: HTTPResponse, param: str, max_bytes: int) -> bytes:
    data = bytearray()
    while piece := response.read1(65_536):
        data += piece
        if len(data) > max_bytes:
            raise BadRequest(f"'{param}' may hold at most {max_bytes} bytes.", param, "image_too_large")
    return bytes(data)


def public_address(host: str, port: int, param: str, seconds: float = 10.0) -> str:
    """Return an address of `host`; raises BadRequest unless all of its addresses are public.

    Raises TimeoutError if resolving takes longer than `seconds`.
    """
    answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            answers.put([])

    # In a thread of its own, because nothing else bounds a resolver's time.
    threading.Thread(target=resolve, name="helmsight-resolve", daemon=True).start()
    try:
        addresses = [str(entry[4][0]) for entry in answers.get(timeout=seconds)]
    except queue.Empty:
        raise TimeoutError from None
    if not addresses or not all(is_public(address) for address in addresses):
        raise _failed(param, _HIDDEN)
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is globally reachable unicast.

    An address that wraps IPv4 addresses is public if all of them are.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        inner += [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)] if ip in _NAT64 else []
        if wrapped := [str(embedded) for embedded in inner if embedded is not None]:
            return all(map(is_public, wrapped))
        if ip not in _UNICAST:
            return False
    special = ip.is_multicast or ip.is_reserved or any(ip in network for network in _SPECIAL)
    return ip.is_global and not special


def _seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; raises TimeoutError after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _failed(param: str, why: str) -> BadRequest:
    return BadRequest(f"'{param}': the image could not be fetched: {why}.", param, "image_fetch_failed")
