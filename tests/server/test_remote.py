"""Remote images: only public addresses, only bounded bytes, only where switched on."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import urllib3

from server import remote
from server.errors import BadRequest


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not remote.is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
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


class Answer:
    def __init__(self, status: int = 200, body: bytes = b"", location: str | None = None):
        self.status, self.body = status, body
        self.headers = {"Location": location} if location else {}

    def read1(self, amount: int, decode_content: bool) -> bytes:
        piece, self.body = self.body[:amount], self.body[amount:]
        return piece

    def release_conn(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pretended network: host name -> (address, answer); records the addresses connected to."""
    hosts: dict[str, Any] = {"connected": []}

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        address = hosts[host][0] if host in hosts else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def urlopen(self: urllib3.HTTPConnectionPool, method: str, path: str, headers: dict[str, str], **_: Any) -> Answer:
        hosts["connected"].append(self.host)
        answer: Answer = hosts[headers["Host"]][1]
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(urllib3.HTTPConnectionPool, "urlopen", urlopen)
    return hosts


def test_the_checked_address_is_the_one_connected_to(web: dict[str, Any]) -> None:
    web["pictures.example"] = ("8.8.8.8", Answer(body=b"bytes"))
    assert remote.fetch("http://pictures.example/a.png", "image", 1000, 2.0) == b"bytes"
    assert web["connected"] == ["8.8.8.8"]


def test_a_redirect_into_the_private_network_is_refused(web: dict[str, Any]) -> None:
    web["pictures.example"] = ("8.8.8.8", Answer(302, location="http://inside.example/"))
    web["inside.example"] = ("10.0.0.1", Answer(body=b"secret"))
    with pytest.raises(BadRequest, match="not public"):
        remote.fetch("http://pictures.example/a.png", "image", 1000, 2.0)
    assert web["connected"] == ["8.8.8.8"]


def test_endless_redirects_and_long_bodies_and_errors_end(web: dict[str, Any]) -> None:
    web["loop.example"] = ("8.8.8.8", Answer(302, location="/again"))
    with pytest.raises(BadRequest, match="redirects"):
        remote.fetch("http://loop.example/", "image", 1000, 2.0)
    web["long.example"] = ("8.8.8.8", Answer(body=b"x" * 2000))
    with pytest.raises(BadRequest, match="at most 1000 bytes"):
        remote.fetch("http://long.example/", "image", 1000, 2.0)
    web["gone.example"] = ("8.8.8.8", Answer(404))
    with pytest.raises(BadRequest, match="status 404"):
        remote.fetch("http://gone.example/", "image", 1000, 2.0)
