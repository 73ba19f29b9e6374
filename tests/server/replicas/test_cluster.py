"""Two replicas of the embedded model under Ray Serve, for real: one is killed under load, a third takes its place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from flask.testing import FlaskClient
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import steering
from server.signals import IGNORED
from tests.server.api.test_streams import post_and_hold, wait_for
from tests.server.conftest import data_uri, user
from tests.server.process.servers import PATIENCE, Server
from tests.server.process.test_gunicorn import ENDLESS

pytest.importorskip("ray.serve")
grpc = pytest.importorskip("grpc")
pytestmark = pytest.mark.slow

COLOURS = ("red", "green", "blue", "yellow", "black", "white")
STREAMS = 4
LONG, SHORT, LAST = 400, 12, 800
SERVE = ["serve", "--replicas", "2", "--threads", "1", "--slots", "2", "--allow-uploads", "--graceful-timeout", "20"]
BINARY = {"Content-Type": "application/octet-stream"}
REPLICA = "ray::ServeReplica:helmsight:Replica"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets have room for short paths only
        server = Server(
            [sys.executable, "-m", "server.cli", *SERVE],
            tmp_path / "log",
            HELMSIGHT_JOURNAL=str(tmp_path / "journal.db"),
            HELMSIGHT_VECTORS=str(tmp_path / "vectors"),
            HOME=str(tmp_path),
            RAY_TMPDIR=short,
        )
        try:
            yield server.wait_until_ready()
        finally:
            server.end()


def body(colour: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat whose answer has exactly so many tokens."""
    content = user(data_uri(Image.new("RGB", (84, 84), colour)), "Describe the picture.")
    return {"messages": [content], "max_tokens": tokens, **ENDLESS, **fields}


def streamed(server: Server, colour: str, tokens: int = LONG) -> tuple[str, str | None]:
    """The text of a long stream, and the code of the error that ended it."""
    text, ended = "", None
    with requests.post(
        f"{server.url}/v1/chat/completions", json=body(colour, tokens, stream=True), stream=True, timeout=PATIENCE
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            said = line.decode().removeprefix("data: ")
            if said == "[DONE]":
                return text, None
            if said:
                event = json.loads(said)
                if "error" in event:
                    ended = event["error"]["code"]
                else:
                    text += event["choices"][0]["delta"].get("content") or ""
    assert ended is not None, "a stream ended without saying so"
    return text, ended


def asked(server: Server, colour: str, tokens: int = SHORT) -> str:
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body(colour, tokens), timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def alone(client: FlaskClient, colour: str, tokens: int) -> str:
    """What one process answers to the same request, with nothing beside it."""
    answer = client.post("/v1/chat/completions", json=body(colour, tokens))
    return str(answer.json["choices"][0]["message"]["content"])


def vector(engine: steering.Engine) -> steering.SteeringVector:
    """One that is another one each time."""
    shape = engine.mllm.num_layers, engine.mllm.hidden_size
    ones = (torch.ones(shape[0]) for _ in range(3))
    return steering.SteeringVector("rolling", torch.randn(shape), *ones, (1, 2), engine.mllm.fingerprint)


def measured(server: Server, name: str, **labels: str) -> dict[str, float]:
    """A metric by replica, of samples with these labels, summed over others."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0) + sample.value
    return found


def replicas(server: Server) -> set[str]:
    """The names of those that serve."""
    said = server.get("/ready").json()["replicas"]
    return {name for name, one in said.items() if one["status"] == "ready"}


def processes(server: Server, title: str = "") -> list[int]:
    """Those that the server has started, also by way of others."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            number = int(folder.name)
            parents[number] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[number] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, ValueError):  # it has ended
            continue

    def ours(number: int) -> bool:
        return number == server.process.pid or (number in parents and ours(parents[number]))

    return [
        number
        for number in parents
        if number != server.process.pid and ours(number) and titles[number].startswith(title)
    ]


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


def test_a_replica_dies_under_load_and_another_takes_its_place(
    server: Server, client: FlaskClient, engine: steering.Engine, tmp_path: Path
) -> None:
    long = {colour: alone(client, colour, LONG) for colour in COLOURS[:STREAMS]}
    short = {colour: alone(client, colour, SHORT) for colour in COLOURS}
    first = replicas(server)
    assert len(first) == len(processes(server, REPLICA)) == 2

    with ThreadPoolExecutor(16) as pool:
        streams = {colour: pool.submit(streamed, server, colour) for colour in long}
        wait_for(lambda: min(measured(server, "helmsight_running").values()) >= 1, PATIENCE)
        others: list[tuple[str, Future[str]]] = [(colour, pool.submit(asked, server, colour)) for colour in COLOURS]
        os.kill(processes(server, REPLICA)[0], signal.SIGKILL)
        for colour, answer in others:
            assert answer.result() == short[colour]
        ended = {colour: stream.result() for colour, stream in streams.items()}
    whole = {colour: text for colour, (text, error) in ended.items() if error is None}
    assert 1 <= len(whole) < STREAMS
    assert whole == {colour: long[colour] for colour in whole}
    for colour, (text, error) in ended.items():
        assert error in (None, "replica_lost")
        assert long[colour].startswith(text)

    # A third one joins, and answers as the others do.
    wait_for(lambda: len(replicas(server)) == 2, PATIENCE)
    (third,) = replicas(server) - first
    assert len(replicas(server) & first) == 1
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
    measures = {"n": 2, "max_tokens": 1450, "logprobs": True, "top_logprobs": 20, **ENDLESS}
    whole_answer = requests.post(
        f"{server.url}/v1/chat/completions", json=body("red", 1450, **measures), timeout=PATIENCE
    )
    assert len(whole_answer.content) > 2**22
    assert len(whole_answer.json()["choices"][1]["logprobs"]["content"]) == 1450

    # A client that leaves frees its slots.
    connection = post_and_hold(server.url, stream=True, n=2, max_tokens=1800, **ENDLESS)
    wait_for(lambda: sum(measured(server, "helmsight_running").values()) == 2, PATIENCE)
    connection.close()
    wait_for(lambda: sum(measured(server, "helmsight_running").values()) == 0, PATIENCE)

    # All of them write one journal.
    done = len(whole) + len(others) + len(asks) + 3 * len(shades) + len(whole_answer.json()["choices"])
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
