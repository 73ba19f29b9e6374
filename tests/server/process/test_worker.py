"""The worker's loop: whoever waits for bytes, or does not take any, holds up nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import pytest
import requests
from flask import Flask

import steering
from server.app import create_app
from server.http import connection as connections
from server.process import worker as workers
from server.settings import Settings
from tests.server.api.test_streams import head
from tests.server.conftest import user
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE, wait_for

Serve = Callable[[Flask], int]
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"messages": [user("hi")]}).encode()
STREAM = json.dumps({"messages": [user("hi")], "stream": True}).encode()


Connect = Callable[[int], socket.socket]


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65_536)
        assert piece, f"the connection ended after {data!r}"
        data += piece
    lines, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in lines.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65_536)
    return int(lines.split()[1]), body


def app_of(fake: FakeEngine, **settings: object) -> Flask:
    return create_app(Settings(slots=1, max_waiting=2, **settings), engine=fake)  # type: ignore[arg-type]


def test_slow_heads_and_bodies_hold_up_nobody(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    port = serve_worker(app_of(fake, read_timeout=10 * PATIENCE))
    slow = [connect(port) for _ in range(150)]
    for number, connection in enumerate(slow):
        connection.sendall(HEALTH[:-4] if number % 3 else head(1000) + b"{")
    for _ in range(10):  # in time only if none of 19 threads waits for a slow client
        assert requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
    chat = requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=json.loads(BODY), timeout=PATIENCE)
    assert chat.json()["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nHost: ", head(1000) + b"{"])
def test_the_deadline_starts_with_the_connection(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, sent: bytes
) -> None:
    connection = connect(serve_worker(app_of(fake, read_timeout=0.8)))
    started = time.monotonic()
    connection.sendall(sent)
    connection.settimeout(0.1)
    received = b""
    while not received and time.monotonic() < started + PATIENCE:
        connection.sendall(b" ")
        try:
            received = connection.recv(1000)
        except TimeoutError:
            continue
    assert b" 408 " in received
    assert b'"code":"request_timeout"' in received
    assert time.monotonic() - started > 0.7


def test_many_that_are_late_together_are_cut_off_a_few_at_a_time(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ACCEPTED", 2)
    cut: list[float] = []
    refuse = workers.Worker._refuse
    monkeypatch.setattr(workers.Worker, "_refuse", lambda *given: (cut.append(given[0]._turns), refuse(*given)))
    turn = workers.Worker._turn

    def counted(worker: workers.Worker) -> None:
        worker._turns = getattr(worker, "_turns", 0) + 1  # type: ignore[attr-defined]
        turn(worker)

    monkeypatch.setattr(workers.Worker, "_turn", counted)
    port = serve_worker(app_of(fake, read_timeout=0.3))
    slow = [connect(port) for _ in range(7)]
    for connection in slow:
        connection.sendall(HEALTH[:-4])
    assert all(b" 408 " in connection.recv(1000) for connection in slow)
    assert max(cut.count(one) for one in cut) == 2


def test_connections_stay_open_and_take_several_requests_at_once(
    fake: FakeEngine, serve_worker: Serve, connect: Connect
) -> None:
    connection = connect(serve_worker(app_of(fake)))
    for _ in range(3):
        connection.sendall(HEALTH)
        assert answer(connection)[0] == 200
    connection.sendall(head(len(BODY)) + BODY + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    received = b""
    while piece := connection.recv(65_536):
        received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.index(b"Hello world") < received.rindex(b'"ok"')


def test_a_client_that_asks_whether_to_continue_is_told(
    fake: FakeEngine, serve_worker: Serve, connect: Connect
) -> None:
    connection = connect(serve_worker(app_of(fake)))
    connection.sendall(head(len(BODY)).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(BODY)
    assert answer(connection)[0] == 200


def test_old_clients_get_an_answer_and_the_end(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    connection = connect(serve_worker(app_of(fake)))
    connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    received = b""
    while piece := connection.recv(65_536):
        received += piece
    assert received.endswith(b'{"status":"ok"}')


def test_broken_requests_are_refused_in_openais_format(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    port = serve_worker(app_of(fake, max_body=2000))
    for sent, status in (
        (b"nonsense\r\n\r\n", 400),
        (head(3).replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), 400),
        (head(3000), 413),
        (head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"xyz\r\n", 400),
        (head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"FFF\r\n" + b"a" * 4095, 413),
    ):
        connection = connect(port)
        connection.sendall(sent)
        found, body = answer(connection)
        assert found == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert connection.recv(1000) == b"", "its connection is closed"


def test_the_host_of_a_whole_url_is_checked(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    connection = connect(serve_worker(app_of(fake)))
    for url, expected in ((b"http://localhost/health", 200), (b"http://rebound.example/health", 403)):
        connection.sendall(HEALTH.replace(b"/health", url))
        assert answer(connection)[0] == expected


def test_no_client_says_where_the_routes_begin(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    connection = connect(serve_worker(app_of(fake)))
    for name in (b"SCRIPT_NAME", b"PATH_INFO"):
        connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\n" + name + b": /x\r\n\r\n"))
        assert answer(connection) == (200, b'{"status":"ok"}')


def test_what_does_not_fit_a_server_below_a_path_is_refused(
    fake: FakeEngine,
    serve_worker: Serve,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SCRIPT_NAME", "/below")
    port = serve_worker(app_of(fake))
    connection = connect(port)
    connection.sendall(HEALTH.replace(b"/health", b"/below/health"))
    assert answer(connection)[0] == 200
    connection.sendall(HEALTH)
    status, body = answer(connection)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
    assert not any(record.exc_info for record in caplog.records)


def test_answers_that_nobody_takes_hold_no_thread(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    fake.script = ("x" * 1_000_000,) * 10
    port = serve_worker(app_of(fake))
    lazy = [connect(port) for _ in range(14)]  # and 11 threads
    for connection in lazy:
        connection.sendall(head(len(STREAM)) + STREAM)
    wait_for(lambda: len(fake.completions) == 14)
    received = 0  # and whoever comes back to read still finds everything
    while piece := lazy[0].recv(1 << 20):
        received += piece.count(b"x")
        if piece.endswith(b"0\r\n\r\n"):
            break
    assert received >= 10_000_000


def test_a_client_that_takes_too_little_is_given_up(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LAG", 100_000)
    fake.script = ("x" * 100_000,) * 200
    connection = connect(serve_worker(app_of(fake, read_timeout=0.8)))
    connection.sendall(head(len(STREAM)) + STREAM)
    wait_for(lambda: bool(fake.completions))
    assert fake.completions[0].cancelled.wait(PATIENCE)


def test_whoever_waits_longest_makes_room_for_a_newcomer(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "raise_file_limit", lambda: workers.SPARE_FILES + 20)
    port = serve_worker(app_of(fake))
    idle = [connect(port) for _ in range(60)]
    assert requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
    assert idle[0].recv(10) == b""


def test_requests_that_are_too_large_together_cost_the_largest(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ALL_INPUT", 1_000_000)
    port = serve_worker(app_of(fake))
    large, small = connect(port), connect(port)
    large.sendall(head(2_000_000) + b" " * 900_000)
    small.sendall(head(300_000) + b" " * 200_000)
    assert answer(large)[0] == 503
    small.sendall(BODY.rjust(100_000))
    assert answer(small)[0] == 200


class Panic(BaseException):
    """An exception that is no `Exception`, like pyo3's PanicException."""


def test_a_panic_ends_its_request_alone(
    fake: FakeEngine, serve_worker: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = serve_worker(app_of(fake))
    good = fake.submit

    def submit(request: object) -> object:
        raise Panic("index out of bounds")

    monkeypatch.setattr(fake, "submit", submit)
    connection = connect(port)
    connection.sendall(head(len(BODY)) + BODY)
    status, body = answer(connection)
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
    monkeypatch.setattr(fake, "submit", good)
    connection = connect(port)
    connection.sendall(head(len(BODY)) + BODY)
    assert answer(connection)[0] == 200


def to_its_end(connection: socket.socket) -> bytes:
    """Return a stream up to its end, head included."""
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(65_536)
        assert piece, f"the connection ended after {received!r}"
        received += piece
    return received


def test_streams_that_wait_for_the_engine_hold_no_thread(
    fake: FakeEngine, serve_worker: Serve, connect: Connect
) -> None:
    """Many more than there are threads are begun, go on together, and end."""
    first, second = threading.Event(), threading.Event()
    fake.script = ("One", first, " two", second, " three")
    port = serve_worker(app_of(fake))
    asking = [connect(port) for _ in range(60)]
    for connection in asking:
        connection.sendall(head(len(STREAM)) + STREAM)
    wait_for(lambda: sum(one.text == "One" for one in fake.completions) == 60)
    first.set()
    wait_for(lambda: sum(one.text == "One two" for one in fake.completions) == 60)
    second.set()
    for connection in asking:
        lines = [line[6:] for line in to_its_end(connection).splitlines() if line.startswith(b"data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content", "") for delta in deltas) == "One two three"


def test_a_stream_that_breaks_while_it_waits_says_so(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    hold = threading.Event()
    fake.script = ("One", hold, steering.Fault("logits were not finite"))
    connection = connect(serve_worker(app_of(fake)))
    connection.sendall(head(len(STREAM)) + STREAM)
    wait_for(lambda: [one.text for one in fake.completions] == ["One"])
    hold.set()
    assert b"logits were not finite" in to_its_end(connection)


def test_health_is_not_queued_behind_chats(fake: FakeEngine, serve_worker: Serve, connect: Connect) -> None:
    hold = threading.Event()
    fake.script = (hold,)
    port = serve_worker(app_of(fake))
    for _ in range(40):
        connect(port).sendall(head(len(BODY)) + BODY)
    wait_for(lambda: len(fake.completions) >= 11)
    assert requests.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
    hold.set()
