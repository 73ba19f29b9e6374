"""Requests read from pieces of bytes: where one ends, what is refused, and that no cut between the pieces matters."""

from __future__ import annotations

import json
import ssl
from contextlib import suppress

import pytest
from gunicorn.config import Config

from server.http.intake import MAX_CHUNKS, MAX_HEAD, Intake, Refused

GET = b"GET /a?b=c HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nhe\r\n3;name=value\r\nllo\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)


def intake(max_body: int = 1000) -> Intake:
    return Intake(Config(), ("127.0.0.1", 1), lambda path: max_body)


def read_all(pieces: list[bytes]) -> list[tuple[str, str, bytes]]:
    """Return (method, target, body) of every request in a connection's bytes."""
    reader, found = intake(), []
    for piece in pieces:
        state = reader.feed(piece)
        while state == "whole":
            request = reader.take()
            found.append((request.method, request.uri, request.body.read()))
            state = reader.feed(b"")
    return found


EXPECTED = [
    ("GET", "/a?b=c", b""),
    ("POST", "/p", b"hello"),
    ("POST", "/c", b"hello0123456789"),
    ("GET", "/a?b=c", b""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_requests_that_follow_one_another_are_told_apart_however_they_are_cut(size: int) -> None:
    data = GET + POST + CHUNKED + GET
    assert read_all([data[at : at + size] for at in range(0, len(data), size)]) == EXPECTED


def refused(data: bytes, max_body: int = 1000) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        intake(max_body).feed(data)
    assert f" {caught.value.status} ".encode() in caught.value.response({})
    return caught.value.status, caught.value.code


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),  # a bare LF
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: zip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: deflate\r\nTransfer-Encoding: Chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nExpect: miracles\r\n\r\n", 417),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * MAX_HEAD, 431),
    ],
)
def test_heads_that_are_refused(head: bytes, status: int) -> None:
    assert refused(head)[0] == status


def test_what_a_refused_head_names_is_known_as_far_as_it_has_come() -> None:
    for head, found in (
        (b"GET / HTTP/1.1\r\nORIGIN: \thttp://a \r\nHo", "http://a"),
        (b"GET / HTTP/1.1\r\nOrigin: http://a", None),  # http://a.example, it may be
        (b"nonsense\r\nOrigin: http://a\r\n\r\n", "http://a"),
        (b"nonsense\r\n\r\nOrigin: http://a\r\n", None),  # that is a body
        (b"GET / HTTP/1.1\r\nHost: h\r\nOrigin: http://a\r\nTransfer-Encoding: zip\r\n\r\n", "http://a"),
    ):
        reader = intake()
        with suppress(Refused):
            reader.feed(head)
        assert reader.field("Origin") == found, head


def test_a_coding_that_is_not_known_is_the_clients_mistake() -> None:
    with pytest.raises(Refused) as caught:
        intake().feed(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n")
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


def test_a_client_that_speaks_tls_is_told_before_its_time_is_over() -> None:
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="h")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    assert refused(outgoing.read()) == (400, "invalid_http")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"GET http://h/ HTTP/1.1\r\n\r\n", b"GET http:///a HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET a://?b HTTP/1.0\r\n\r\n", b"GET a?b://c HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET http://[h/ HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)  # fmt: skip
def test_a_request_without_a_host_is_refused(head: bytes) -> None:
    assert refused(head) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("head", "host"),
    [
        (b"GET /http://other/ HTTP/1.1\r\nHost: h:1\r\n\r\n", ["h:1"]),
        (b"GET http://other:8/a HTTP/1.1\r\nHost: localhost\r\n\r\n", ["other:8"]),
        (b"GET HTTP://user@other HTTP/1.0\r\n\r\n", ["user@other"]),
        (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", ["h"]),
        (b"GET / HTTP/1.0\r\n\r\n", []),
    ],
)
def test_the_host_of_a_whole_url_counts(head: bytes, host: list[str]) -> None:
    reader = intake()
    assert reader.feed(head) == "whole"
    assert [value for name, value in reader.take().headers if name == "HOST"] == host


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense\r\n", b"-1\r\n", b"0x5\r\nhello\r\n", b"5\nhello\r\n", b"2\r\nhello\r\n", b"\r\n", b"5" * 20 + b"\r\n",
        b"1" * 2000, b"5;\x00\r\nhello\r\n", b"0\r\n" + b"a: b\r\n" * 20_000,
    ],
)  # fmt: skip
def test_chunks_that_are_framed_wrongly_are_refused(body: bytes) -> None:
    head = CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert refused(head + body) == (400, "invalid_body")


def test_a_body_of_countless_chunks_is_refused() -> None:
    head = CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert refused(head + b"1\r\na\r\n" * (MAX_CHUNKS + 1), max_body=2 * MAX_CHUNKS) == (413, "too_many_chunks")


def test_a_body_beyond_the_limit_is_seen_to_be_too_long() -> None:
    stated = intake(4)
    assert stated.feed(POST) == "whole"
    assert not stated.complete
    chunked = intake(4)
    assert chunked.feed(CHUNKED) == "whole"
    assert not chunked.complete
    assert len(chunked.take().body.read()) > 4


def test_who_expects_to_be_told_to_continue_is_known_until_the_body_comes() -> None:
    reader = intake()
    head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n"
    assert (reader.feed(head), reader.expects) == ("body", True)
    assert intake().feed(head + b"h") == "body"
    old = intake()
    assert (old.feed(head.replace(b"1.1", b"1.0")), old.expects) == ("body", False)
