"""Two stacks, Helmsight in front of vLLM each, behind nginx as deploy/nginx.conf sets it up: one is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

import steering
from served.chats import numbered
from served.serving import LAYERS, Address, served
from server.app import create_app
from server.settings import Settings
from tests.server.conftest import ask, user
from tests.server.deploy.conftest import nginx
from tests.server.deploy.test_files import needs
from tests.server.process.servers import COMMAND, Server, children
from tests.waiting import wait_for

pytestmark = needs("nginx")
COUNT = 24
PATIENCE = 600.0
"""Seconds for a server to be ready, and for an answer."""


@dataclass
class Stack:
    """Helmsight's server and the vLLM server behind it."""

    front: Server
    vllm: Address

    @property
    def port(self) -> int:
        return int(self.front.url.rpartition(":")[2])


@contextmanager
def stack(folder: Path, work: Path) -> Iterator[Stack]:
    """Run a stack; what it compares vLLM with is kept in `work`, which is its home."""
    with served(folder, work, *LAYERS["eager"]) as url:
        log = work / f"front-{url.rpartition(':')[2]}.log"
        # HELMSIGHT_VLLM_ENV is a setting of Helmsight's, too, where it starts vLLM itself.
        settings = {"HELMSIGHT_MODEL": str(folder), "HELMSIGHT_ENGINE": f"vllm={url}", "HELMSIGHT_VLLM_ENV": None}
        flags = ("--slots", "16", "--journal", "off")
        front = Server([*COMMAND, "serve", *flags], log, HOME=str(work), **settings)
        try:
            yield Stack(front.wait_until_ready(PATIENCE), url)
        finally:
            front.end()


def kill(process: int) -> None:
    """End a process and all that it has started, without notice."""
    started = children(process)
    os.kill(process, signal.SIGKILL)
    for child in started:
        kill(child)


@pytest.fixture(scope="module")
def kept(folder: Path, work: Path) -> Iterator[Stack]:
    with stack(folder, work) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the messages that our own engine answers with."""
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=8, max_waiting=64, threads=1)
    engine.start()
    client = create_app(Settings(journal="off"), engine=engine).test_client()  # type: ignore[arg-type]
    answers = [ask(client, *parts, **fields).json["choices"] for parts, fields in map(numbered, range(COUNT))]
    engine.stop()
    return [[choice["message"] for choice in choices] for choices in answers]


@pytest.mark.parametrize("lost", ["vllm", "vllm and helmsight"])
def test_no_answer_is_lost_with_a_replica(
    lost: str, kept: Stack, expected: list[list[dict[str, Any]]], folder: Path, work: Path, tmp_path: Path
) -> None:
    with stack(folder, work) as doomed, nginx(tmp_path, kept.port, doomed.port) as url:

        def answer(number: int, **more: Any) -> requests.Response:
            parts, fields = numbered(number)
            body = {"messages": [user(*parts)], "temperature": 0, **fields, **more}
            response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
            assert response.status_code == 200, response.text
            return response

        with ThreadPoolExecutor(COUNT) as threads:
            pending = [threads.submit(answer, number) for number in range(COUNT)]
            wait_for(lambda: min(one.front.stats("helmsight_running") for one in (kept, doomed)) > 2, seconds=PATIENCE)
            doomed.vllm.kill()
            if lost == "vllm and helmsight":
                kill(doomed.front.process.pid)
            answers = [one.result().json()["choices"] for one in pending]
        streams = [answer(0, stream=True).text for _ in range(2)]  # each stack is asked first by one of them
        assert requests.get(f"{url}/ready", timeout=PATIENCE).ok
        if lost == "vllm":
            assert doomed.front.get("/ready").status_code == 503
        log = [json.loads(line) for line in (tmp_path / "helmsight.log").read_text().splitlines()]
    assert [[choice["message"] for choice in choices] for choices in answers] == expected
    assert [content(stream) for stream in streams] == [expected[0][0]["content"]] * 2
    # nginx states a time for each replica that it has asked.
    assert sum(", " in line["upstream_seconds"] for line in log if line["path"] == "/v1/chat/completions") > 2


def content(stream: str) -> str:
    """Return the text of a streamed answer."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
