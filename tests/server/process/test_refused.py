"""Requests that the worker refuses before an application reads them.

Everybody can read why, and nobody is held up by it.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from server.http.connection import Connection
from server.process import worker as workers
from server.telemetry.logs import current
from tests.server.api.test_streams import head
from tests.server.fakes import FakeEngine
from tests.server.process.test_worker import Connect, Serve, answer, app_of
from tests.waiting import PATIENCE, wait_for

PAGE = "https://app.example.org"
FROM_PAGE = head(9).replace(b"\r\n\r\n", f"\r\nOrigin: {PAGE}\r\nX-Request-Id: mine\r\n\r\n".encode())
IN_CHUNKS = FROM_PAGE.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (FROM_PAGE, 408), (FROM_PAGE[:-2], 408), (IN_CHUNKS + b"xyz\r\n", 400), (IN_CHUNKS.replace(b"chunked", b"zip"), 501),
        (FROM_PAGE.replace(b"/v1", b"/" + b"a" * 9000), 414), (FROM_PAGE[:-2] + b"A: b\r\n" * 200 + b"\r\n", 431),
        (FROM_PAGE[:-2] + b"A: " + b"b" * 66_000, 431), (FROM_PAGE.replace(b"HTTP/1.1", b"HTTP"), 400),
    ],
)  # fmt: skip
def test_what_no_application_reads_has_an_id_and_can_be_read_by_pages_elsewhere(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, caplog: pytest.LogCaptureFixture, sent: bytes, status: int
) -> None:
    named: list[str | None] = []
    caplog.handler.addFilter(lambda record: named.append(current.get()) or True)
    port = serve_worker(app_of(fake, cors_origin=(PAGE,), read_timeout=0.8 if status == 408 else PATIENCE))
    for page, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
        with caplog.at_level("INFO"), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(sent.replace(PAGE.encode(), page.encode()))
            response = HTTPResponse(connection)
            response.begin()
        assert response.status == status
        assert (response.headers["X-Request-Id"], named[-1]) == ("mine", "mine")
        assert (response.headers["Access-Control-Allow-Origin"], response.headers["Vary"]) == (allowed, "Origin")


@pytest.mark.parametrize("end", [b"", b"/count_tokens"])
def test_refusals_of_anthropics_routes_have_its_form(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, end: bytes
) -> None:
    hasty, patient = (serve_worker(app_of(fake, read_timeout=seconds)) for seconds in (0.3, PATIENCE))
    asked = head(9).replace(b"/v1/chat/completions", b"/v1/messages" + end)
    asked = asked.replace(b"\r\n\r\n", b"\r\nX-Request-Id: mine\r\n\r\n")
    for sent, status, kind in (
        (asked, 408, "invalid_request_error"),
        (asked.replace(b"Content-Length: 9", b"Transfer-Encoding: zip"), 501, "api_error"),
        (asked[:-2] + b"A: b\r\n" * 200 + b"\r\n", 431, "invalid_request_error"),
    ):
        port = hasty if status == 408 else patient
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(sent)
            response = HTTPResponse(connection)
            response.begin()
            value = json.loads(response.read())
        assert (response.status, value["type"], value["error"]["type"]) == (status, "error", kind)
        assert value["request_id"] == response.headers["request-id"] == response.headers["X-Request-Id"] == "mine"


def test_a_body_that_its_route_does_not_take_is_refused_before_it_is_sent(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, tmp_path: Path
) -> None:
    port = serve_worker(
        app_of(fake, max_body=2000, max_vector_bytes=4000, allow_uploads=True, vectors=(str(tmp_path),))
    )
    for path, size, said in (
        (b"/v1/chat/completions", 3000, b" 413 "),
        (b"/v1/steering/vectors", 3000, b" 100 "),
        (b"/v1/steering%2Fvectors?name=a", 3000, b" 100 "),
        (b"/v1/steering/vectors", 5000, b" 413 "),
    ):
        connection = connect(port)
        asked = head(size).replace(b"/v1/chat/completions", path)
        if b"vectors" in path:
            asked = asked.replace(b"application/json", b"application/octet-stream")
        connection.sendall(asked.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert said in connection.recv(1000).split(b"\r\n")[0], (path, size)


def test_who_sends_on_can_read_why_he_was_refused_but_not_without_end(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, read, drained = [0.0], workers.Worker._read_off, list[int]()

    def read_off(worker: workers.Worker, one: Connection) -> None:
        read(worker, one)
        drained.append(one.drained)

    monkeypatch.setattr(workers.Worker, "_read_off", read_off)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(workers, "LINGER", 1.0)
    connection = connect(serve_worker(app_of(fake, max_body=2000, read_timeout=3.0)))
    connection.sendall(head(10**9))
    wait_for(lambda: drained)
    for sent in (100_000, 200_000, 300_000):
        connection.sendall(b" " * 100_000)
        wait_for(lambda sent=sent: drained[-1] == sent)  # type: ignore[misc]
        now[0] += 0.9
    assert answer(connection)[0] == 413

    def is_cut() -> bool:
        try:
            connection.sendall(b" ")
        except ConnectionError:
            return True
        return False

    connection.sendall(b" ")
    wait_for(lambda: drained[-1] == 300_001)
    now[0] = 3.3
    wait_for(is_cut)


def test_those_that_send_on_make_room_for_a_newcomer(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "raise_file_limit", lambda: workers.SPARE_FILES + 20)
    monkeypatch.setattr(workers, "LINGER", 60.0)
    port = serve_worker(app_of(fake, max_body=2000, read_timeout=60.0))
    for _ in range(20):
        connection = connect(port)
        connection.sendall(head(3000))
        assert answer(connection)[0] == 413
    assert requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
