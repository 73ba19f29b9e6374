"""nginx in front of a server, as deploy/nginx.conf sets it up."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ports import own_port
from tests.server.deploy.test_files import NGINX, folders
from tests.waiting import PATIENCE, wait_for

NAME = "helmsight.example.org"
PAGE = "https://app.example.org"


Front = Callable[..., str]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """Start nginx in front of ports of this machine; returns its URL."""
    with ExitStack() as stack:
        yield lambda *ports: stack.enter_context(nginx(tmp_path, *ports))


@contextmanager
def nginx(folder: Path, *ports: int) -> Iterator[str]:
    """Run nginx as deploy/nginx.conf sets it up, its files in a folder, in front of a server or two; yield its URL."""
    own = own_port()
    text = NGINX.replace("/var/log/nginx", str(folder))
    text = re.sub(r"(?m)^    listen 80;", f"    listen 127.0.0.1:{own};", text).replace(f'# "{PAGE}"', f'"{PAGE}"')
    text = text.replace("    # server", "    server") if len(ports) > 1 else text
    for number, port in enumerate(ports):
        text = text.replace(f":{8000 + number} ", f":{port} ")
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ {folders(folder)}\n{text} }}"
    )
    process = subprocess.Popen([shutil.which("nginx") or "", "-c", str(main), "-e", f"{folder}/error.log"])
    try:

        def listens() -> bool:
            assert process.poll() is None, (folder / "error.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", own)) == 0

        wait_for(listens)
        yield f"http://127.0.0.1:{own}"
    finally:
        process.terminate()
        process.wait(PATIENCE)
