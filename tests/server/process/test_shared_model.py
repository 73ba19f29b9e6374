"""A server whose model two processes share, as torchrun starts them."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from tests.server.conftest import data_uri, user
from tests.server.process.servers import PATIENCE, Server
from tests.steering.parallel.asking import differences

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
SERVE = [sys.executable, "-m", "server.cli", "serve", "--tensor-parallel", "2", "--threads", "1"]
BODY: dict[str, Any] = {
    "messages": [user(data_uri(), "Describe the picture.")],
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 3,
    "sage": True,
    "diagnostics": {"include": ["modality", "residual", "focus"]},
}


@contextmanager
def launched(by: str, folder: Path) -> Iterator[Server]:
    """Start two processes by torchrun, or fork them with its environment, and yield the first."""
    if by == "torchrun":
        server, others = Server([*TORCHRUN, *SERVE], folder / "log"), []
    else:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        first, second = (
            {**address, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in "01"
        )
        server = Server(SERVE, folder / "log", **first)
        others = [Server(SERVE, folder / "other", **second)]
    try:
        yield server
    finally:
        for each in (server, *others):
            each.end()


@pytest.mark.parametrize("by", ["fork", pytest.param("torchrun", marks=pytest.mark.long)])
def test_it_answers_as_a_process_of_its_own_does_and_drains(by: str, client: FlaskClient, tmp_path: Path) -> None:
    with launched(by, tmp_path) as server:
        server.wait_until_ready()
        said = server.post(**BODY).json()["choices"]
        alone = client.post("/v1/chat/completions", json=BODY).get_json()["choices"]
        # What rises is a share of a vocabulary in which many tokens do not differ but by rounding.
        assert [place for place in differences(alone, said) if "/gains/" not in place] == []

        long = BODY | {"max_tokens": 25, "stream": True, "ignore_eos": True}
        with requests.post(server.url + "/v1/chat/completions", json=long, stream=True, timeout=PATIENCE) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith(b"data: "))
            for _ in range(5):
                next(lines)
            server.process.terminate()
            rest = list(lines)
        assert rest[-1] == b"data: [DONE]"
        last = [json.loads(line.removeprefix(b"data: ")) for line in rest[:-1]][-1]
        assert last["choices"][0]["finish_reason"] == "length"
        server.process.wait(PATIENCE)
    told = "".join(log.read_text() for log in (tmp_path / "log", tmp_path / "other") if log.exists())
    assert "rank 1 of 2, which follows" in told
    assert "CRITICAL" not in told
