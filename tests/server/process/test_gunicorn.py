"""The server as it is run: gunicorn, one worker, the model loaded after the fork, signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from gunicorn.arbiter import Arbiter

from server.engine_process.starts import TRIES
from tests.server.api.test_streams import post_and_hold
from tests.server.conftest import user
from tests.server.fakes import checkpoint
from tests.server.process.servers import Server, children
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SERVE = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--slots", "4"]
STOP_ID = str(json.loads((checkpoint() / "generation_config.json").read_text())["eos_token_id"])
ENDLESS = {"logit_bias": {STOP_ID: -100}, "temperature": 0}


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(command: list[str], **environ: str) -> Server:
            server = Server(command, tmp_path / "server.log", **environ)
            stack.callback(server.end)
            return server

        yield begin


def test_serving_from_the_first_probe_to_the_drain(start: Start, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    server = start([*SERVE, "--graceful-timeout", str(int(PATIENCE)), "--max-body", "20000", "--journal", journal])
    wait_for(lambda: "Listening at" in server.log.read_text())
    assert server.get("/health").status_code == 200
    server.wait_until_ready()
    assert server.post(max_tokens=4).json()["choices"][0]["finish_reason"] == "length"
    assert "text/event-stream" in server.post(stream=True, max_tokens=2).headers["Content-Type"]

    # Bodies without a length, too long, and malformed.
    json_type = {"Content-Type": "application/json"}
    chat = server.url + "/v1/chat/completions"
    pieces = (b"x" * 1000 for _ in range(30))
    assert requests.post(chat, data=pieces, headers=json_type, timeout=PATIENCE).status_code == 413
    assert requests.post(chat, data=b"x" * 30_000, headers=json_type, timeout=PATIENCE).status_code == 413
    body = json.dumps({"messages": [user("hi")], "max_tokens": 2}).encode()
    assert requests.post(chat, data=iter([body]), headers=json_type, timeout=PATIENCE).status_code == 200
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n"
        )
        assert b" 400 " in connection.recv(1000)

    # A client that leaves frees its slots.
    connection = post_and_hold(server.url, stream=True, n=4, max_tokens=1800, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 4)
    connection.close()
    wait_for(lambda: server.stats("helmsight_running") == 0)

    # A worker that dies in the middle of an answer: the client's connection ends, another takes its place.
    connection = post_and_hold(server.url, stream=True, max_tokens=1800, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 1)  # else the next worker would take it
    (dead,) = children(server.process.pid)
    (engine,) = children(dead)
    os.kill(dead, signal.SIGKILL)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65_536):
            pass
    connection.close()
    wait_for(lambda: children(server.process.pid) not in ([], [dead]))
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    server.wait_until_ready()
    assert server.post(max_tokens=4).json()["usage"]["completion_tokens"] == 4

    # The engine's process that dies: the client is told, and both are replaced.
    connection = post_and_hold(server.url, stream=True, max_tokens=1800, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 1)
    (worker,) = children(server.process.pid)
    (engine,) = children(worker)
    os.kill(engine, signal.SIGKILL)
    received = b""
    while piece := connection.recv(65_536):
        received += piece
    connection.close()
    assert b"model_failed" in received
    wait_for(lambda: children(server.process.pid) not in ([], [worker]))
    server.wait_until_ready()
    assert server.post(max_tokens=4).json()["usage"]["completion_tokens"] == 4

    # SIGTERM: the running answers are finished, a new one is refused, then the process ends, and the journal has all.
    answers: list[requests.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(max_tokens=400, n=2, **ENDLESS)))
    thread.start()
    wait_for(lambda: server.stats("helmsight_running") == 2)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/ready").json()["status"] == "draining")
    refused = server.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_draining")
    assert "Retry-After" in refused.headers
    thread.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 800
    assert server.process.wait(PATIENCE) == 0
    command = [sys.executable, "-m", "server.cli", "journal", "export", "--journal", journal]
    exported = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [row for row in map(json.loads, exported.splitlines()) if row["id"] == answers[0].json()["id"]]
    assert sorted((row["choice"], row["finish_reason"]) for row in rows) == [(0, "length"), (1, "length")]
    assert all(row["usage"]["completion_tokens"] == 400 for row in rows)


def engine_beside(server: Server, *dead: int) -> int:
    """Return the current engine process, which replaces those that are dead."""
    found: list[int] = []

    def there() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(FileNotFoundError):
            found[:] = [engine for worker in children(server.process.pid) for engine in children(worker)]
        return bool(found) and found[0] not in dead

    wait_for(there)
    return found[0]


def test_an_engine_that_is_killed_while_it_loads_is_replaced_too(start: Start) -> None:
    server = start(SERVE).wait_until_ready()
    dead: list[int] = []
    for _ in range(2):
        dead.append(engine_beside(server, *dead))
        os.kill(dead[-1], signal.SIGKILL)
    engine_beside(server, *dead)
    server.wait_until_ready()
    assert server.post(max_tokens=2).ok
    assert "failed to load" not in server.log.read_text()


def test_a_server_whose_engine_never_was_ready_ends_after_some_tries(start: Start) -> None:
    server = start(SERVE)
    dead: list[int] = []
    for _ in range(TRIES):
        dead.append(engine_beside(server, *dead))
        os.kill(dead[-1], signal.SIGKILL)
    assert server.process.wait(PATIENCE) == Arbiter.APP_LOAD_ERROR
    assert f"{TRIES} processes in a row" in server.log.read_text()


@pytest.mark.parametrize(
    "command", [SERVE, [sys.executable, "-m", "gunicorn", "-c", "deploy/gunicorn.conf.py", "server.wsgi:app"]]
)
def test_no_stranger_and_no_signal_disturbs_what_runs(start: Start, command: list[str]) -> None:
    server = start(command, HELMSIGHT_THREADS="1", HELMSIGHT_API_KEYS="secret-key").wait_until_ready()

    # Who has no key gets no answer, and writes no line into the log.
    assert server.get("/v1/models").status_code == 401
    for path in ("/v1/models%0d%0aFAKE%20LINE", "/v1/models%1b[31mFAKE", "/v1/models%c2%85FAKE"):
        assert server.get(path).status_code == 401
    requests.get(server.url + "/health", headers={"User-Agent": "a\tFAKE"}, timeout=PATIENCE)
    lines = server.log.read_text().splitlines()
    assert sum("FAKE" in line for line in lines) == 3
    assert not any(line.startswith("FAKE") for line in lines)
    assert all(line.isprintable() for line in lines)

    # No signal starts a second engine, or ends what runs.
    server.headers = {"Authorization": "Bearer secret-key"}
    assert server.get("/v1/models").status_code == 200
    (worker,) = children(server.process.pid)
    engines = children(worker)
    connection = post_and_hold(server.url, stream=True, shown=server.headers, max_tokens=400, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 1)
    for process in engines:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):  # it ends as its worker does
            os.kill(process, number)
    for process in (server.process.pid, worker, *engines):
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU):
            os.kill(process, number)
    received = b""
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        received += (piece := connection.recv(65_536))
        assert piece, "the stream was cut off"
    connection.close()
    assert (children(server.process.pid), children(worker)) == ([worker], engines)


def test_an_interrupt_ends_the_server_although_an_answer_is_running(start: Start) -> None:
    server = start([*SERVE, "--graceful-timeout", str(int(10 * PATIENCE))]).wait_until_ready()
    connection = post_and_hold(server.url, stream=True, max_tokens=1800, n=4, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 4)
    received = b""
    server.process.send_signal(signal.SIGINT)
    while piece := connection.recv(65_536):
        received += piece
    connection.close()
    assert b'"code":"model_draining"' in received
    server.process.wait(PATIENCE)  # and not for the answer


def test_clients_are_told_of_the_end_although_the_engine_hangs(start: Start) -> None:
    server = start([*SERVE, "--graceful-timeout", "2"]).wait_until_ready()
    connection = post_and_hold(server.url, stream=True, max_tokens=1900, n=4, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 4)
    answers: list[requests.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.post(max_tokens=400))) for _ in range(8)]
    os.kill(engine_beside(server), signal.SIGSTOP)
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    received = b""
    while piece := connection.recv(65_536):
        received += piece
    connection.close()
    for thread in threads:
        thread.join()
    assert b'"code":"model_draining"' in received
    assert [one.json()["error"]["code"] for one in answers] == ["model_draining"] * 8
    assert server.process.wait(PATIENCE) == 0


def test_an_answer_that_outlasts_the_grace_is_cut_off_with_an_error(start: Start) -> None:
    server = start([*SERVE, "--graceful-timeout", "2"]).wait_until_ready()
    connection = post_and_hold(server.url, stream=True, max_tokens=1900, n=4, **ENDLESS)
    wait_for(lambda: server.stats("helmsight_running") == 4)
    started, received = time.monotonic(), b""
    server.process.send_signal(signal.SIGTERM)
    while piece := connection.recv(65_536):
        received += piece
    connection.close()
    assert b'"code":"model_draining"' in received
    assert time.monotonic() - started >= 2, "less grace than was promised"
    assert server.process.wait(PATIENCE) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_sentence_and_an_exit_status(
    start: Start, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint(), model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 8  # which only the weights tell to be wrong
    (model / "config.json").write_text(json.dumps(config))
    server = start([*SERVE, "--model", str(model)])
    assert server.process.wait(PATIENCE) not in (0, None)
    said = server.log.read_text()
    assert said.count("could not be loaded") == 1
    assert "Traceback" not in said


def test_a_signal_while_the_worker_still_boots_ends_the_server(start: Start) -> None:
    server = start(SERVE)
    wait_for(lambda: "Booting worker" in server.log.read_text())
    time.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0


def test_the_message_that_it_is_ready_names_the_port_that_the_system_chose(start: Start) -> None:
    server = start(SERVE, HELMSIGHT_PORT="0")
    wait_for(lambda: " is ready after " in server.log.read_text())
    (named,) = re.findall(r"is ready after .* at (http://127\.0\.0\.1:\d+): ", server.log.read_text())
    server.url = named
    assert server.get("/ready").ok
    assert "127.0.0.1:0" not in server.log.read_text()
