"""A request on its way from the front to a replica, and its answer; imports neither Flask nor torch nor Ray."""

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
"""Finds the first image's URL, since quotes within the chat's texts are escaped."""


@dataclass(frozen=True)
class Call:
    """A complete request: `path` is decoded, `query` is raw, the names of `headers` are in lower case."""

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
        """True if the request may be repeated: it changes nothing, or is a chat whose answer nobody has seen yet."""
        return self.method in ("GET", "HEAD", "OPTIONS") or self.path == "/v1/chat/completions"

    @property
    def picture(self) -> bytes | None:
        """A digest of the first image's URL, which includes the image itself for a data URL; None without one."""
        match = _URL.search(self.body) if self.method == "POST" else None
        return None if match is None else hashlib.blake2b(match[1], digest_size=16).digest()

    def environ(self, connection: socket.socket) -> dict[str, Any]:
        """Return the WSGI environment (PEP 3333); `connection` is closed when the client leaves, for `Watcher` to notice."""
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
            "wsgi.input_terminated": True,  # the body is complete, whatever its declared length
            "gunicorn.socket": connection,
        }
        for name, value in self.headers:
            if b"_" in name:  # it could be mistaken for a name with a hyphen
                continue
            key = name.decode("latin1").upper().replace("-", "_")
            key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
            text = value.decode("latin1")
            environ[key] = f"{environ[key]},{text}" if key in environ else text
        return environ


@dataclass(frozen=True)
class AnswerHead:
    """The status and headers of an answer."""

    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Whole:
    """An answer with its whole body, and the name of the replica that gave it."""

    replica: str
    head: AnswerHead
    body: bytes
