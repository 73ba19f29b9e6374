"""`serve run deploy.ray:app`, as docs/operations.md has it, on a cluster of this machine alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from tests.server.process.servers import PATIENCE, Server
from tests.server.replicas.cluster import SHORT, alone, asked, replicas

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

PORT = 8000
"""Where `serve run` listens; it has no option for another one."""


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
        )
        server.url = f"http://127.0.0.1:{PORT}"
        try:
            server.wait_until_ready()
            assert len(replicas(server)) == 1
            assert asked(server, "red") == alone(client, "red", SHORT)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE) == 0
        finally:
            server.end()
