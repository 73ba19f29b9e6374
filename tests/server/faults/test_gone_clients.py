"""Clients that disconnect at every stage of their request, each several times.

Nothing of theirs stays behind, their requests are counted as given up, and the next client is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api.test_streams import connect, head
from tests.server.conftest import user
from tests.server.process.servers import PATIENCE, Server, children
from tests.server.process.test_gunicorn import ENDLESS
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SLOTS, TIMES = 2, 4
NOTICED = 0.5
"""Seconds in which the worker finds a client gone, on a quiet machine; later ones get several times as many."""
SERVE = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--slots", str(SLOTS)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server([*SERVE, "--journal", str(tmp_path / "journal.db")], tmp_path / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.end()


def total(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class Clients:
    """Clients that leave before they have their answers.

    `asked` counts those whose request was sent as a whole.
    """

    def __init__(self, server: Server):
        self.server = server
        self.asked: dict[str, int] = {"whole": 0, "stream": 0}

    def request(self, stage: str, number: int, text: str = "hi", **fields: Any) -> bytes:
        content = user(f"{number} {stage} {text}")  # of which no beginning is known yet
        body = {"messages": [content], "stream": number % 2 == 1, "max_tokens": 1800, **ENDLESS, **fields}
        said = json.dumps({**body, "metadata": {"stage": stage}}).encode()
        return head(len(said)) + said

    def send(self, request: bytes, size: int | None = None) -> socket.socket:
        """Return an open connection over which a request was sent, or only its first `size` bytes."""
        connection = connect(self.server.url)
        connection.sendall(request[:size])
        if size is None:
            self.asked["stream" if b'"stream": true' in request else "whole"] += 1
        return connection

    def all_gone(self) -> None:
        """Wait until nothing runs or waits and all are counted."""
        asked, server = sum(self.asked.values()), self.server
        wait_for(lambda: total(server, "helmsight_disconnects_total", reason="gone") >= asked, PATIENCE)
        wait_for(lambda: server.stats("helmsight_running") == server.stats("helmsight_waiting") == 0, PATIENCE)
        assert total(server, "helmsight_disconnects_total") == asked


def leave(connection: socket.socket, reset: bool = False) -> None:
    """Close, or reset as the death of a client's machine may."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_clients_that_are_gone_at_any_stage_leave_nothing_behind(server: Server, tmp_path: Path) -> None:
    clients = Clients(server)
    numbers = range(TIMES)

    def answers() -> list[str]:
        """Return the texts of four answers to requests sent at once."""
        with ThreadPoolExecutor(4) as pool:
            said = [pool.submit(server.post, max_tokens=8, **ENDLESS) for _ in range(4)]
        return [one.result().json()["choices"][0]["message"]["content"] for one in said]

    right = answers()
    assert len(set(right)) == 1

    # In the head, and in the body: nobody has asked for anything.
    for number in numbers:
        request = clients.request("unread", number)
        begun = request.index(b"\r\n\r\n") + 4
        sizes = (1, begun // 2, begun - 1, begun, begun + 1, (begun + len(request)) // 2, len(request) - 1)
        for connection in [clients.send(request, size) for size in sizes]:
            leave(connection, reset=number % 2 == 1)
    assert answers() == right
    assert total(server, "helmsight_requests_total", method="POST") == 8, "only those that were answered"

    # Right behind the body.
    for number in numbers:
        leave(clients.send(clients.request("behind", number)))
    clients.all_gone()

    # While they wait for a slot, and those that have the slots while they generate.
    for one, other in pairwise(range(TIMES + 1)):
        running = [clients.send(clients.request("generating", number)) for number in (one, other)]
        wait_for(lambda: server.stats("helmsight_running") == SLOTS)
        waiting = [clients.send(clients.request("waiting", number)) for number in numbers]
        wait_for(lambda: server.stats("helmsight_waiting") == TIMES)
        for number, connection in enumerate(waiting):
            leave(connection, reset=number < 2)
        wait_for(lambda: server.stats("helmsight_waiting") == 0)
        assert server.stats("helmsight_running") == SLOTS, "those that run are not theirs"
        for connection in running:
            if one % 2 == 0:  # else they have read nothing, of a stream either
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    connection.recv(200)
            leave(connection, reset=one % 2 == 1)
        clients.all_gone()

    # During a prefill: the engine is stopped in it until the worker has noticed.
    (worker,) = children(server.process.pid)
    (engine,) = children(worker)
    for number in range(2 * TIMES):
        connection = clients.send(clients.request("prefill", number, "word " * 1500, max_tokens=500))
        time.sleep(0.02 * (number // 2 + 1))
        os.kill(engine, signal.SIGSTOP)
        leave(connection)
        time.sleep(NOTICED * (number // 2 + 1))
        os.kill(engine, signal.SIGCONT)
        clients.all_gone()

    assert answers() == right
    assert server.stats("helmsight_faults_total") == 0
    asked = clients.asked
    assert server.stats("helmsight_cancelled_total") == sum(asked.values())
    refused = total(server, "helmsight_refusals_total", status="499", reason="client_closed")
    assert refused == asked["whole"], "of a stream the status was out"
    assert total(server, "helmsight_refusals_total") == refused
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
        rows = (
            "SELECT json_extract(metadata, '$.stage'), completion_tokens FROM helmsight_journal WHERE finish_reason = ?"
        )
        wait_for(lambda: len(journal.execute(rows, ["cancelled"]).fetchall()) == sum(asked.values()), PATIENCE)
        tokens: dict[str, list[int]] = {}
        for stage, count in journal.execute(rows, ["cancelled"]):
            tokens.setdefault(stage, []).append(count)
    assert set(tokens["waiting"]) == {0}
    assert min(tokens["generating"]) > 0
    assert min(tokens["prefill"]) == 0, "none left during a prefill"
    log = server.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
