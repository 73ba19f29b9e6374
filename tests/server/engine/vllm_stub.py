"""A stand-in for the interpreter of `--vllm-env`: it notes how it was called, asks for the key, and passes requests on.

What answers is a server of the test's own process: importing torch once more would take longer than all that is tested.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path


def write_environment(folder: Path, root: Path, port: int) -> Path:
    """Write a folder that looks like a virtual environment, whose interpreter runs this file, and return it.

    root: the repository. port: where the server listens that answers. Asked for its packages (`-I`), the interpreter has
    all.
    """
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    run = f'PYTHONPATH={root} exec {sys.executable} -m {__name__} "{folder}" {port} "$@"'
    python.write_text(f'#!/bin/sh\n[ "$1" = -I ] && exit 0\n{run}\n')
    python.chmod(0o700)
    return folder


class Relay(BaseHTTPRequestHandler):
    """Passes on a request that has the key, to `port`."""

    port = 0

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.send_error(401)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get_content_type())
        self.end_headers()
        while part := answer.read1():
            self.wfile.write(part)

    do_POST = do_GET


def main() -> None:
    """Note the call in the environment's folder, and serve as soon as no file `wait` is there."""
    folder, port, *arguments = sys.argv[1:]
    note = {"arguments": arguments, "environment": dict(os.environ), "pid": os.getpid(), "parent": os.getppid()}
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(note))
    Relay.port = int(port)
    while Path(folder, "wait").exists():
        time.sleep(0.05)
    ThreadingHTTPServer(("127.0.0.1", int(dict(pairwise(arguments))["--port"])), Relay).serve_forever()


if __name__ == "__main__":
    main()
