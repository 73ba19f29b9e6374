"""A request on its way from the front to a replica, and what comes back. Imports neither Flask nor torch nor Ray."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

_URL = re.compile(rb'"url"\s*:\s*"([^"]+)"')
"""In a text of the chat the quotes are escaped, so that the first one is the first picture's."""


@dataclass(frozen=True)
class Call:
    """A request, whole: `path` is decoded, `query` as it came, the names of `headers` in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    client: tuple[str, int] | None = None
    server: tuple[str, int | None] | None = None
    scheme: str = "http"

    @property
    def repeatable(self) -> bool:
        """Whether asking again does no harm: it changes nothing, or is a chat, whose answer nobody has seen yet."""
        return self.method in ("GET", "HEAD", "OPTIONS") or self.path == "/v1/chat/completions"

    @property
    def picture(self) -> bytes | None:
        """A digest of the URL of the first picture, which holds its bytes where it is a data URL; None without one."""
        found = _URL.search(self.body) if self.method == "POST" else None
        return None if found is None else hashlib.blake2b(found[1], digest_size=16).digest()

    def environ(self, connection: socket.socket) -> dict[str, Any]:
        """The WSGI environment (PEP 3333). `connection` is hung up when the client leaves, as `Watcher` looks for."""
        host, port = self.server or ("localhost", None)
        environ: dict[str, Any] = {
            "REQUEST_METHOD": self.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": self.path.encode().decode("latin1"),
            "QUERY_STRING": self.query.decode("latin1"),
            "RAW_URI": quote_from_bytes(self.path.encode()) + (f"?{self.query.decode('latin1')}" if self.query else ""),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "SERVER_NAME": host,
            "SERVER_PORT": str(port or 80),
            "REMOTE_ADDR": self.client[0] if self.client else "",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": self.scheme,
            "wsgi.input": io.BytesIO(self.body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
            "wsgi.input_terminated": True,  # all of the body is here, whatever its length was said to be
            "gunicorn.socket": connection,
        }
        for name, value in self.headers:
            if b"_" in name:  # it could pass for one with a hyphen
                continue
            key = name.decode("latin1").upper().replace("-", "_")
            key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
            text = value.decode("latin1")
            environ[key] = f"{environ[key]},{text}" if key in environ else text
        return environ


@dataclass(frozen=True)
class AnswerHead:
    """How an answer begins."""

    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Whole:
    """An answer with all of its body, and the name of the replica that gave it."""

    replica: str
    head: AnswerHead
    body: bytes
