"""Remote images: only public addresses, only bounded bytes, only where switched on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.errors import BadRequest
from server.images import remote
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "nonsense", "192.0.0.192", "192.0.0.9", "192.88.99.1",
        "198.18.0.1", "203.0.113.5", "240.0.0.1", "fec0::1", "2001:db8::1", "3fff::1", "5f00::1", "::8.8.8.8", "100::1",
        "64:ff9b:1::808:808", "64:ff9b::a00:1", "2002:a00:1::1", "2001:20::1", "::ffff:0:8.8.8.8", "fd00::1",
        "2001:0:a00:1::f7f7:f7f7", "2001:0:808:808::f5ff:fffe",  # Teredo: a private server, a private client
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not remote.is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert remote.is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png", "http://localhost/a.png", "http://[::1]/a.png", "http://2130706433/", "http://0x7f.1/",
        "http://169.254.169.254/latest/meta-data", "http://user:pass@8.8.8.8/", "http:///a", "http://[bad/", "https://a:99999/",
    ],
)  # fmt: skip
def test_urls_into_the_private_network_are_refused(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        remote.fetch(url, "image", 1000, 2.0)
    assert caught.value.code == "image_fetch_failed"


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(BadRequest, match="not public"):
        remote.public_address("example.com", 80, "image")


class Site:
    """A web server of one connection after another: host name -> bytes to send, or pieces of them with a pause between."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answers: dict[str, bytes | tuple[bytes, ...]] = {}
        self.requests: list[bytes] = []
        self.resolved: dict[str, str] = {}
        self.pause = 0.1
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                request = connection.recv(65_536)
                self.requests.append(request)
                host = request.partition(b"Host: ")[2].partition(b"\r\n")[0].decode()
                answer = self.answers[host]
                for piece in (answer,) if isinstance(answer, bytes) else answer:
                    connection.sendall(piece)
                    time.sleep(0 if isinstance(answer, bytes) else self.pause)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Names resolve as the test says; every connection to a public address goes to one local server."""
    site = Site()

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (site.resolved.get(host, "8.8.8.8"), port))]

    def connected(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("8.8.8.8", 80), "only what was checked is connected to"
        sock = socket.socket()
        sock.settimeout(timeout)
        sock.connect(("127.0.0.1", site.port))
        return sock

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connected)
    yield site
    site.listener.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_an_image_is_fetched_from_the_address_that_was_checked(web: Site) -> None:
    web.answers["pictures.example"] = ok(b"bytes")
    assert remote.fetch("http://pictures.example/a b.png?x=1", "image", 1000, 2.0) == b"bytes"
    assert web.requests[0].startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\nHost: pictures.example\r\n")
    web.answers["pictures.example"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbytes\r\n0\r\n\r\n"
    assert remote.fetch("http://pictures.example/", "image", 1000, 2.0) == b"bytes"


def test_a_redirect_into_the_private_network_is_refused(web: Site) -> None:
    web.answers["pictures.example"] = b"HTTP/1.1 302 Found\r\nLocation: http://inside.example/\r\n\r\n"
    web.resolved["inside.example"] = "10.0.0.1"
    with pytest.raises(BadRequest, match="not public"):
        remote.fetch("http://pictures.example/a.png", "image", 1000, 2.0)
    assert len(web.requests) == 1


def test_endless_redirects_and_long_bodies_and_errors_end(web: Site) -> None:
    web.answers["loop.example"] = b"HTTP/1.1 302 Found\r\nLocation: /again\r\n\r\n"
    with pytest.raises(BadRequest, match="redirects"):
        remote.fetch("http://loop.example/", "image", 1000, 2.0)
    web.answers["long.example"] = ok(b"x" * 2000)
    with pytest.raises(BadRequest, match="at most 1000 bytes"):
        remote.fetch("http://long.example/", "image", 1000, 2.0)
    web.answers["gone.example"] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(BadRequest, match="status 404"):
        remote.fetch("http://gone.example/", "image", 1000, 2.0)
    web.answers["noise.example"] = b"noise"
    with pytest.raises(BadRequest, match="BadStatusLine"):
        remote.fetch("http://noise.example/", "image", 1000, 2.0)


@pytest.mark.parametrize(
    "dripped",
    [
        (b"HTTP/1.1 200 OK\r\n", *(b"A: b\r\n",) * 90),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *(b"x",) * 90),
        (b"HTTP/1.1 100 Continue\r\n\r\n",) * 90,
    ],
)
def test_whatever_drips_meets_the_deadline(web: Site, dripped: tuple[bytes, ...]) -> None:
    web.answers["slow.example"] = dripped
    with pytest.raises(BadRequest, match="took too long"):  # it would end otherwise after nine seconds
        remote.fetch("http://slow.example/", "image", 1000, 0.6)


def test_a_name_that_never_resolves_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(PATIENCE) and [])
    with pytest.raises(BadRequest, match="took too long"):
        remote.fetch("http://slow.example/", "image", 1000, 0.3)
    release.set()
