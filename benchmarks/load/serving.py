"""A server of its own for a benchmark."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

READY = "is ready after"
COMPILED = "steps are compiled"
"""What a server's log says once the model is loaded, and once its steps are compiled."""


@dataclass(frozen=True)
class Server:
    """A running server: the process id of gunicorn's master, and the port on loopback."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(*options: str, checkout: Path | None = None, until: Sequence[str] = (READY,)) -> Iterator[Server]:
    """Run a server of a checkout (default: this one) without a journal, once its log says all of `until`.

    Raises RuntimeError where it ends before.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "server.cli", "serve", "--journal", "off", "--no-access-log", "--port", str(port)]
    environment = dict(os.environ) if checkout is None else os.environ | {"PYTHONPATH": str(checkout.resolve())}
    with tempfile.NamedTemporaryFile("r") as log:
        process = subprocess.Popen(
            [*command, *options], cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=log.fileno()
        )
        try:
            while not all(words in (output := Path(log.name).read_text()) for words in until):
                if process.poll() is not None:
                    raise RuntimeError(f"The server ended before it was ready:\n{output}")
                time.sleep(0.2)
            yield Server(process.pid, port)
        finally:
            process.terminate()
            process.wait()


def children(process: int) -> list[int]:
    """Return the ids of the processes that a process's main thread started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
