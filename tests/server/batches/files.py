"""Files of requests and responses for tests of batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from server.batches.file import URL, BatchResponse
from server.batches.measured import Digests


def request(name: str, text: str = "What colour is it?", **fields: Any) -> dict[str, Any]:
    """Return a request as OpenAI's guide writes it."""
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **fields}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


def write(path: Path, rows: Iterable[Any]) -> Path:
    """Write lines of JSON; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Scripted:
    """A transport whose answers are what `answer` returns; it keeps the bodies that it got."""

    model = "scripted"
    identity = "scripted 1"
    models = frozenset({"scripted", "scripted@vision", "scripted@sage"})
    at_once = 2
    registry = None
    forces = True

    def __init__(self, answer: Any = None) -> None:
        self.known = Digests()
        self.bodies: list[Mapping[str, Any]] = []
        self._answer = answer or (lambda body: completion("ok"))

    def digests(self) -> Digests:
        return self.known

    def send(self, body: Mapping[str, Any]) -> BatchResponse:
        self.bodies.append(body)
        answer: BatchResponse = self._answer(body)
        return answer


def completion(text: str, **choice: Any) -> BatchResponse:
    """Return a successful response."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "model": "scripted", "choices": choices, "usage": usage}
    return BatchResponse(200, body, "req_1")


def failure(status: int, message: str = "no") -> BatchResponse:
    """Return a response with an error."""
    return BatchResponse(status, {"error": {"message": message, "type": "t", "param": None, "code": "c"}}, "req_1")
