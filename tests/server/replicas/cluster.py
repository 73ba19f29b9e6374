"""Servers of several replicas under Ray Serve, and what is asked of them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import requests
from flask.testing import FlaskClient
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import data_uri, user
from tests.server.process.servers import PATIENCE, Server
from tests.server.process.test_gunicorn import ENDLESS

REPLICA = "ray::ServeReplica:helmsight:Replica"
SERVE = ["serve", "--threads", "1", "--slots", "2", "--graceful-timeout", "60"]
LONG, SHORT = 400, 12
"""Tokens of an answer that is streamed, and of one that is not."""


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """Start a server with these arguments and its journal in the folder, and yield it once it is ready."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets have room for short paths only
        server = Server(
            [sys.executable, "-m", "server.cli", *SERVE, *arguments],
            folder / "log",
            anew=True,  # Ray starts its processes by the program that this one is
            HELMSIGHT_JOURNAL=str(folder / "journal.db"),
            HELMSIGHT_VECTORS=str(folder / "vectors"),
            HOME=str(folder),
            RAY_TMPDIR=short,
        )
        try:
            yield server.wait_until_ready()
        finally:
            server.end()


def body(colour: str | None, tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a chat whose answer has exactly `tokens` tokens, about a picture of `colour` unless that is None."""
    pictures = [] if colour is None else [data_uri(Image.new("RGB", (84, 84), colour))]
    content = user(*pictures, "Describe the picture.")
    return {"messages": [content], "max_tokens": tokens, **ENDLESS, **fields}


def streamed(
    server: Server, colour: str | None, tokens: int = LONG, left: Event | None = None, begun: Event | None = None
) -> tuple[str, str | None]:
    """Return the text of a long stream, and the code of the error that ended it.

    The code is "left" where the client left, once that event was set. `begun` is set when a replica has said something,
    after which no other one can take its place.
    """
    text, ended = "", None
    with requests.post(
        f"{server.url}/v1/chat/completions", json=body(colour, tokens, stream=True), stream=True, timeout=PATIENCE
    ) as answer:
        assert answer.status_code == 200
        if begun is not None:
            begun.set()
        for line in answer.iter_lines():
            said = line.decode().removeprefix("data: ")
            if said == "[DONE]":
                return text, None
            if left is not None and left.is_set():
                return text, "left"
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


def alone(client: FlaskClient, colour: str | None, tokens: int) -> str:
    """Return the answer of a single process to the same request, with nothing beside it."""
    answer = client.post("/v1/chat/completions", json=body(colour, tokens))
    return str(answer.json["choices"][0]["message"]["content"])


def measured(server: Server, name: str, **labels: str) -> dict[str, float]:
    """Return a metric by replica: the sum of its samples with these labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0) + sample.value
    return found


def replicas(server: Server) -> set[str]:
    """Return the names of the replicas that are ready."""
    said = server.get("/ready").json()["replicas"]
    return {name for name, one in said.items() if one["status"] == "ready"}


def processes(server: Server, title: str = "") -> list[int]:
    """Return the processes that the server has started, directly or indirectly."""
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
