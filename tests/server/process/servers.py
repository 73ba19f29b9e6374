"""Servers as processes of their own, for tests of the whole."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import requests

from tests.server.conftest import data_uri, user
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
PATIENCE = 90
"""Seconds that a busy machine may take for what takes one on a quiet one."""


def children(process: int) -> list[int]:
    """The processes that a process has forked."""
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


class Server:
    """A server process on a free port. environ: variables beside this process's own; those that are None are taken away."""

    def __init__(self, command: list[str], log: Path, **environ: str | None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.headers: dict[str, str] = {}
        told = {**os.environ, "HELMSIGHT_PORT": str(port), **environ}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={name: value for name, value in told.items() if value is not None},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def get(self, route: str) -> requests.Response:
        return requests.get(self.url + route, headers=self.headers, timeout=PATIENCE)

    def post(self, **fields: Any) -> requests.Response:
        body = {"messages": [user(data_uri(), "Describe the picture.")], **fields}
        return requests.post(self.url + "/v1/chat/completions", json=body, timeout=60)

    def stats(self, name: str) -> float:
        (line,) = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])

    def wait_until_ready(self, seconds: float = 180) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.get("/ready").ok
            except (requests.ConnectionError, requests.Timeout):  # on a busy machine its first answer takes long
                return False

        try:
            wait_for(ready, seconds=seconds)
        except AssertionError:
            self.end()
            raise
        return self

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
