"""A server that answers with what a test says, and questions to ask it."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from PIL import Image

import steering
from probes.answering.base import Question

PLAIN = {"id": "small", "object": "model", "owned_by": "somebody", "vectors": 3}
HELMSIGHT = PLAIN | {
    "owned_by": "helmsight", "vectors": ["modality-preference", "calm"], "fingerprint": "abc", "limits": {},
}  # fmt: skip
Answer = tuple[int, dict[str, str], Any]  # status, headers, and a body that is JSON unless it is bytes


def said(text: str | None, **more: Any) -> Answer:
    return 200, {}, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, **more}]}


def echo(body: dict[str, Any]) -> Answer:
    return said(body["messages"][0]["content"])


def failed(status: int, message: str = "no", **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": message}}


def cut_off(text: str) -> Answer:
    """Break the connection in the middle of the body."""
    return 200, {"X-Missing": "10"}, said(text)[2]


class Server(ThreadingHTTPServer):
    """Lists `models` (or answers with that status), answers chats with `answer`, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: list[Any] | Answer = [PLAIN]
        self.answer: Callable[[dict[str, Any]], Answer] = echo
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.sources: list[str | None] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.counting = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that did not wait
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        models = self.server.models
        self.send((200, {}, {"data": models}) if isinstance(models, list) else models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            self.server.bodies.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        answer = self.server.answer(body)
        with self.server.counting:
            self.server.at_once -= 1
        if answer[0]:  # 0 closes the connection without a word
            self.send(answer)

    def send(self, answer: Answer) -> None:
        status, headers, body = answer
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["Authorization"])
        self.server.sources.append(self.headers["X-Helmsight-Source"])
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        length = len(data) + int(headers.get("X-Missing", 0))
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


def asked(text: str, **more: Any) -> Question:
    return Question([{"role": "user", "content": text}], **more)


def numbered() -> Iterator[Question]:
    return (asked(str(number)) for number in itertools.count())


def assert_equal_pictures(one: Image.Image, other: Image.Image) -> None:
    assert (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("helmsight-endpoint")]


def vector(name: str, layers: int = 2, width: int = 4, fingerprint: str = "abc") -> steering.SteeringVector:
    direction = torch.randn(layers, width, generator=torch.Generator().manual_seed(0))
    ones = (torch.ones(layers) for _ in range(3))
    return steering.SteeringVector(name, direction, *ones, (1,), fingerprint)
