"""The embedded model under Ray Serve, for real.

A replica is killed under load and another takes its place, one joins with the load and leaves when few ask, and a
cluster's own command serves it. All is in one file, so that no two clusters run at once: they would take more than
twice as long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import requests
import torch
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.startup.signals import IGNORED
from tests.server.api.test_streams import post_and_hold
from tests.server.conftest import data_uri, user
from tests.server.process.servers import PATIENCE, Server
from tests.server.process.test_gunicorn import ENDLESS
from tests.server.replicas.cluster import (
    LONG,
    REPLICA,
    SHORT,
    alone,
    asked,
    body,
    measured,
    processes,
    replicas,
    serving,
    streamed,
)
from tests.waiting import wait_for

pytest.importorskip("ray.serve")
grpc = pytest.importorskip("grpc")
pytestmark = pytest.mark.long
"""`test_local` has replicas without a cluster, the other files beside it their parts."""

COLOURS = ("red", "green", "blue", "yellow", "black", "white")
STREAMS = 4
LAST = 800
PATIENT = "--graceful-timeout", "120"
"""The replica that ends has time for its last stream even where other tests have the machine."""
BINARY = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, "--replicas", "2", "--allow-uploads", *PATIENT) as server:
        yield server


def vector(engine: steering.Engine) -> steering.SteeringVector:
    """Return a vector that is different each time."""
    shape = engine.mllm.num_layers, engine.mllm.hidden_size
    ones = (torch.ones(shape[0]) for _ in range(3))
    return steering.SteeringVector("rolling", torch.randn(shape), *ones, (1, 2), engine.mllm.fingerprint)


def open_to_others(server: Server) -> list[int]:
    """Ports that the server's processes listen on at other addresses than loopback."""
    inodes = set()
    for number in [server.process.pid, *processes(server)]:
        for link in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes and not address.endswith("0100007F"):
                found.append(int(port, 16))
    return found


def at_work(server: Server) -> dict[str, float]:
    """Answers that run or wait, by replica."""
    waiting = measured(server, "helmsight_waiting")
    return {name: count + waiting[name] for name, count in measured(server, "helmsight_running").items()}


def test_a_replica_dies_under_load_and_another_takes_its_place(
    server: Server, client: FlaskClient, engine: steering.Engine, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        texts = [pool.submit(alone, client, colour, LONG) for colour in COLOURS[:STREAMS]]
        long = {colour: text.result() for colour, text in zip(COLOURS, texts, strict=False)}
    short = {colour: alone(client, colour, SHORT) for colour in COLOURS}
    first = replicas(server)
    assert len(first) == len(processes(server, REPLICA)) == 2

    with ThreadPoolExecutor(16) as pool:
        killed, begun = processes(server, REPLICA)[0], [Event() for _ in long]
        streams = {
            colour: pool.submit(streamed, server, colour, begun=event)
            for colour, event in zip(long, begun, strict=True)
        }
        assert all(event.wait(PATIENCE) for event in begun)
        wait_for(lambda: sum(at_work(server).values()) == STREAMS, PATIENCE)
        work = at_work(server)
        others: list[tuple[str, Future[str]]] = [(colour, pool.submit(asked, server, colour)) for colour in COLOURS]
        wait_for(lambda: sum(at_work(server).values()) > STREAMS, PATIENCE)
        assert not any(stream.done() for stream in streams.values())
        os.kill(killed, signal.SIGKILL)
        for colour, answer in others:
            assert answer.result() == short[colour]
        ended = {colour: stream.result() for colour, stream in streams.items()}
    whole = {colour: text for colour, (text, error) in ended.items() if error is None}
    assert whole == {colour: long[colour] for colour in whole}
    for colour, (text, error) in ended.items():
        assert error in (None, "replica_lost")
        assert long[colour].startswith(text)

    # A third one joins, and answers as the others do.
    wait_for(lambda: len(replicas(server)) == 2, PATIENCE)
    (third,) = replicas(server) - first
    (lost,) = first - replicas(server)
    assert STREAMS - len(whole) == work[lost], "a stream broke that was not the dead one's"
    assert 1 <= work[lost] < STREAMS
    with ThreadPoolExecutor(4) as pool:
        asks = [(colour, pool.submit(asked, server, colour)) for colour in COLOURS * 4]
        assert all(answer.result() == short[colour] for colour, answer in asks)
    assert measured(server, "helmsight_choices_total").get(third, 0) > 0

    # The same picture goes to the same replica, which has it in its cache.
    shades = [f"#{number:02x}8040" for number in range(8)]
    before = sum(measured(server, "helmsight_image_cache_misses_total").values())
    for shade in shades * 3:
        asked(server, shade, 2)
    encoded = sum(measured(server, "helmsight_image_cache_misses_total").values()) - before
    assert len(shades) <= encoded < 1.3 * len(shades)  # 1.75 times as many where chance chooses

    # A vector that is replaced is the new one everywhere, from then on.
    for _ in range(2):
        sent = vector(engine)
        data = sent.to_bytes()
        vectors = f"{server.url}/v1/steering/vectors"
        assert requests.post(f"{vectors}?replace=true", data=data, headers=BINARY, timeout=PATIENCE).status_code == 201
        for _ in range(12):
            got = steering.SteeringVector.from_bytes(server.get("/v1/steering/vectors/rolling/file").content)
            assert torch.equal(got.direction, sent.direction)
    assert set(measured(server, "helmsight_requests_total", route="/v1/steering/vectors/<name>/file")) == replicas(
        server
    )

    # What is larger than gRPC's usual message goes both ways.
    large = body("red", 2)
    large["messages"][0]["content"].append({"type": "text", "text": " " * 5 * 2**20})
    too_long = requests.post(f"{server.url}/v1/chat/completions", json=large, timeout=PATIENCE)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    pictures = [data_uri(Image.effect_noise((1400, 1400), 120).convert("RGB"), "JPEG")] * 5
    looked = {"messages": [user(*pictures, "?")], "diagnostics": {"include": ["patches"], "heatmaps": True}}
    maps = requests.post(f"{server.url}/v1/chat/completions", json={**body("red", 2), **looked}, timeout=PATIENCE)
    assert len(maps.content) > 2**22
    assert len(maps.json()["choices"][0]["diagnostics"]["heatmaps"]) == len(pictures)

    # A client that leaves frees its slots.
    connection = post_and_hold(server.url, stream=True, n=2, max_tokens=1800, **ENDLESS)
    wait_for(lambda: sum(measured(server, "helmsight_running").values()) == 2, PATIENCE)
    connection.close()
    wait_for(lambda: sum(measured(server, "helmsight_running").values()) == 0, PATIENCE)

    # All of them write one journal.
    done = len(whole) + len(others) + len(asks) + 3 * len(shades) + 1
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
        count = "SELECT count(*) FROM helmsight_journal WHERE finish_reason = 'length'"
        wait_for(lambda: journal.execute(count).fetchone()[0] >= done, PATIENCE)
        assert journal.execute(count).fetchone()[0] <= done + len(others)  # one was perhaps written as its replica died

    # Of Ray's ports others reach those of replicas and front alone, which want to be told a secret.
    ports = open_to_others(server)
    assert len(ports) <= 3
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=PATIENCE)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not (tmp_path / ".ray").exists()

    # SIGTERM: what runs is finished, what is new is refused, and nothing stays behind.
    left = processes(server)
    last: list[tuple[str, str | None]] = []
    thread = threading.Thread(target=lambda: last.append(streamed(server, "red", LAST)))
    thread.start()
    wait_for(lambda: sum(measured(server, "helmsight_running").values()) == 1, PATIENCE)
    for number in IGNORED:
        server.process.send_signal(number)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/ready").json()["status"] == "draining")
    refused = requests.post(f"{server.url}/v1/chat/completions", json=body("red", 2), timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_draining")
    thread.join()
    ((text, error),) = last
    assert error is None
    assert text.startswith(long["red"])
    assert len(text) > 1.9 * len(long["red"])
    assert server.process.wait(PATIENCE) == 0
    wait_for(lambda: not any(Path(f"/proc/{number}").exists() for number in left), PATIENCE)
    socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))).close()


# -- a replica joins, and leaves -------------------------------------------------------------------------------------------

FEW_COLOURS = COLOURS[:4]
TOKENS, LONGEST = 60, 1900
SAME = 200
"""Characters of the longest answers that are compared: of so many tokens two are alike at some point, and batches decide."""
SCALED = [
    "--replicas", "1", "--max-replicas", "2", "--replica-requests", "2.5", "--replica-added-after", "1",
    "--replica-removed-after", "4", "--no-compiled", *PATIENT,
]  # fmt: skip


def serve(server: Server, count: int) -> bool:
    """Return whether `count` replicas are ready.

    It waits before it asks: questions count as requests at work, too.
    """
    time.sleep(0.5)
    return len(replicas(server)) == count


def test_replicas_come_with_the_load_and_go_with_it(client: FlaskClient, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(FEW_COLOURS)) as pool:
        expected = {colour: pool.submit(alone, client, colour, TOKENS) for colour in FEW_COLOURS}
        expected_last = pool.submit(alone, client, None, LONGEST)
        with serving(tmp_path, *SCALED) as server:
            texts, last = {colour: one.result() for colour, one in expected.items()}, expected_last.result()
            first, enough = replicas(server), Event()
            assert len(first) == 1

            def again(colour: str) -> int:
                """Stream one answer after the other; how many."""
                count = 0
                while not enough.is_set():
                    assert streamed(server, colour, TOKENS) == (texts[colour], None)
                    count += 1
                return count

            streams = [pool.submit(again, colour) for colour in FEW_COLOURS]
            wait_for(lambda: serve(server, 2) or any(one.done() for one in streams), PATIENCE)
            (second,) = replicas(server) - first
            wait_for(lambda: measured(server, "helmsight_choices_total").get(second, 0) > 0, PATIENCE)
            enough.set()
            answers = sum(one.result() for one in streams)

            # A stream on each: not more than one is to have, so that the other leaves, but only after its stream has ended.
            placed: dict[str, Future[tuple[str, str | None]]] = {}
            for _ in range(8):
                before, left = measured(server, "helmsight_running"), Event()
                stream = pool.submit(streamed, server, None, LONGEST, left)
                wait_for(lambda before=before: measured(server, "helmsight_running") != before, PATIENCE)
                now = measured(server, "helmsight_running")
                (name,) = (name for name in now if now[name] > before[name])
                if name not in placed:
                    placed[name] = stream
                    if len(placed) == 2:
                        break
                else:  # both on one, as the router's numbers are of a moment ago
                    left.set()
                    stream.result()
                    wait_for(lambda before=before: measured(server, "helmsight_running") == before, PATIENCE)
            assert placed.keys() == replicas(server)
            lasts = list(placed.values())
            wait_for(lambda: serve(server, 1) or any(one.done() for one in lasts), PATIENCE)
            assert not any(one.done() for one in lasts), "a replica was to leave before its stream had ended"
            assert len(processes(server, REPLICA)) == 2
            ends = [one.result() for one in lasts]
            assert [(text[:SAME], error) for text, error in ends] == [(last[:SAME], None)] * 2
            wait_for(lambda: len(processes(server, REPLICA)) == 1, PATIENCE)
            assert streamed(server, "red", TOKENS) == (texts["red"], None)

            # Of all of these the journal has rows, also of those that the replica wrote that is gone.
            with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
                rows = "SELECT count(*) FROM helmsight_journal WHERE finish_reason = 'length'"
                wait_for(lambda: journal.execute(rows).fetchone()[0] == answers + len(lasts) + 1, PATIENCE)


# -- the command of a cluster -------------------------------------------------------------------------------------------

PORT = 8000
"""Port on which `serve run` listens; it has no option for another one."""


def test_the_application_for_a_cluster_answers_as_one_process_does(client: FlaskClient, tmp_path: Path) -> None:
    try:
        socket.create_server(("127.0.0.1", PORT)).close()
    except OSError:
        pytest.skip(f"port {PORT} is taken")
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets have room for short paths only
        server = Server(
            [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", "deploy.ray:app"],
            tmp_path / "log",
            HELMSIGHT_REPLICAS="1",
            HELMSIGHT_THREADS="1",
            HELMSIGHT_JOURNAL="off",
            HELMSIGHT_VECTORS=str(tmp_path / "vectors"),
            HOME=str(tmp_path),
            PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
            RAY_TMPDIR=short,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60",
        )
        server.url = f"http://127.0.0.1:{PORT}"
        try:
            server.wait_until_ready()
            assert len(replicas(server)) == 1
            assert asked(server, "red") == alone(client, "red", SHORT)
        finally:
            server.end()
