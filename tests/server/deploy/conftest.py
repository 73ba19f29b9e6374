"""nginx in front of a server, as deploy/nginx.conf sets it up."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.server.deploy.test_files import NGINX, folders

NAME = "helmsight.example.org"
PAGE = "https://app.example.org"


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        return int(held.getsockname()[1])


Front = Callable[[int], str]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """Start nginx in front of a port of this machine; returns its URL."""
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> str:
        own = free_port()
        text = NGINX.replace("/var/log/nginx", str(tmp_path))
        text = re.sub(r"(?m)^    listen 80;", f"    listen 127.0.0.1:{own};", text).replace(":8000", f":{port}")
        text = text.replace(f'# "{PAGE}"', f'"{PAGE}"')
        main = tmp_path / "nginx.conf"
        main.write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
            f"http {{ {folders(tmp_path)}\n{text} }}"
        )
        started.append(subprocess.Popen([shutil.which("nginx") or "", "-c", str(main), "-e", f"{tmp_path}/error.log"]))
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", own)) == 0:
                    return f"http://127.0.0.1:{own}"
            time.sleep(0.01)
        raise AssertionError((tmp_path / "error.log").read_text())

    yield start
    for process in started:
        process.terminate()
        process.wait(10)
