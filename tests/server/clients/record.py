"""Records what a client sends to a running server: a proxy, and a script of `asking/` in the client's own environment.

    python -m tests.server.clients.record http://127.0.0.1:8000 langchain /tmp/lc/bin/python with_langchain.py

writes `recorded/langchain.json`. Those of `asking/dialects/` are recorded twice: all of them before the embedded model,

    ... record http://127.0.0.1:8000 dialects/openai PYTHON dialects/with_openai_responses.py

and, as `dialects/openai-tools`, what has tools before a toy whose template knows them, with the environment
`MODEL=calling-hermes ONLY=tool`. Both servers have `--store on`. The script finds the server in
OPENAI_BASE_URL and a picture in PICTURE (one for Node its packages in NODE_MODULES, too), and prints last what it is: `{"client": ..., "version": ...}`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.conftest import data_uri

HERE = Path(__file__).parent
KEPT = ("user-agent", "content-type", "accept", "transfer-encoding")
"""Headers that could matter to a server. Of the others, `authorization` would name a key."""

RESPONSE = re.compile(rb"resp_[0-9a-f]{32}")
"""The id of an answer, which later requests continue."""


def proxy(upstream: str, recorded: list[dict[str, Any]]) -> ThreadingHTTPServer:
    """Return a proxy to `upstream` on a free port, which appends each request to `recorded`.

    A record includes the answer's status or error.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def handle_one(self) -> None:
            body = self.body()
            connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=120)
            sent = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("host", "transfer-encoding", "content-length")
            }
            connection.request(self.command, self.path, body or None, sent)
            answer = connection.getresponse()
            one: dict[str, Any] = {"method": self.command, "path": self.path, "status": answer.status}
            one["headers"] = {name: self.headers[name] for name in KEPT if name in self.headers}
            if body:
                one["body"] = json.loads(body)
            recorded.append(one)
            said = answer.read() if answer.status >= 400 else b""
            if said:
                error = json.loads(said)["error"]
                one["error"] = {name: error[name] for name in ("param", "code")}
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(said)
            while piece := answer.read1():
                if "id" not in one and (identity := RESPONSE.search(piece)):
                    one["id"] = identity[0].decode()
                self.wfile.write(piece)
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_POST = do_DELETE = do_OPTIONS = do_HEAD = handle_one

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main(upstream: str, name: str, interpreter: str, script: str) -> None:
    """Run the script before the proxy and write what it sent, one request a line."""
    recorded: list[dict[str, Any]] = []
    server = proxy(upstream, recorded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "PICTURE": data_uri(), "PYTHONPATH": str(HERE / "asking")}
    ran = subprocess.run(
        [interpreter, str(HERE / "asking" / script)],
        env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    server.shutdown()
    print(ran.stdout)
    if ran.returncode:
        sys.exit(ran.returncode)
    kept = {**json.loads(ran.stdout.splitlines()[-1]), "requests": recorded}
    lines = ",\n".join(json.dumps(one) for one in kept.pop("requests"))
    if name.startswith("dialects/"):
        kept["model"] = os.environ.get("MODEL", "helmsight-demo")
    text = json.dumps(kept)[:-1] + f', "requests": [\n{lines}\n]}}\n'
    (HERE / "recorded" / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
