"""The front between Ray Serve's proxy and the replicas: what it reads, whom it asks again, what it says of the dead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from ray.exceptions import ActorDiedError
from starlette.requests import Request

from server.replicas.call import AnswerHead, Call, Whole
from server.replicas.front import TRIES, Front
from server.settings import Settings
from tests.server.replicas.loops import ran

JSON = AnswerHead(200, (("Content-Type", "application/json"), ("Connection", "close"), ("X-Request-Id", "mine")))
EVENTS = AnswerHead(200, (("Content-Type", "text/event-stream; charset=utf-8"),))
CHAT = "/v1/chat/completions"
Script = tuple[Any, ...]


class Replicas:
    """Each call plays the next script: what is yielded, and exceptions that are raised."""

    def __init__(self, *scripts: Script, wholes: tuple[Any, ...] = (), populated: bool = True):
        self.scripts = list(scripts)
        self.wholes = wholes
        self.populated = populated
        self.calls: list[Call] = []

    def options(self, **_: Any) -> Replicas:
        return self

    def running_replicas_populated(self) -> bool:
        return self.populated

    def remote(self, call: Call) -> AsyncIterator[Any]:
        self.calls.append(call)
        return self._play(self.scripts.pop(0))

    async def _play(self, script: Script) -> AsyncIterator[Any]:
        for one in script:
            if isinstance(one, Exception):
                raise one
            yield one

    def broadcast(self, method: str, *args: Any) -> Replicas:
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        return list(self.wholes)


def asked(replicas: Replicas, method: str = "POST", path: str = CHAT, body: bytes = b"{}", **settings: Any) -> Any:
    """(status, headers, body) of a request through a front."""
    return through(Front(replicas, Settings(**settings)), method, path, body)


def through(front: Front, method: str = "POST", path: str = CHAT, body: bytes = b"{}", headers: Any = ()) -> Any:
    sent: list[Any] = []
    pieces = [body[at : at + 10] for at in range(0, len(body), 10)] or [b""]

    async def receive() -> Any:
        if not pieces:
            await asyncio.sleep(60)
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces) or piece == b"slow"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"a=1", "scheme": "http",
            "headers": [(b"host", b"x"), *headers], "client": ("::1", 1), "server": ("::1", 2),
            "asgi": {"spec_version": "2.4"},
        }  # fmt: skip
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    ran(run())
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in rest)


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def test_an_answer_passes_through_without_what_is_the_connections() -> None:
    replicas = Replicas((JSON, b"{}", b"!"))
    assert asked(replicas, body=b"0123456789abc") == (200, {b"content-type": b"application/json"}, b"{}!")
    (call,) = replicas.calls
    assert (call.body, call.query, call.headers) == (b"0123456789abc", b"a=1", ((b"host", b"x"),))


def test_a_chat_whose_replica_dies_before_it_says_anything_is_asked_again() -> None:
    replicas = Replicas((ActorDiedError(),), (JSON, b"ok"))
    assert asked(replicas)[::2] == (200, b"ok")
    assert replicas.calls[0] == replicas.calls[1]
    status, headers, body = asked(Replicas(*[(ActorDiedError(),)] * TRIES))
    assert (status, headers[b"retry-after"], code(body)) == (503, b"1", "replica_lost")


def test_what_changes_something_is_not_asked_again() -> None:
    replicas = Replicas((ActorDiedError(),), (JSON, b"ok"))
    assert asked(replicas, path="/v1/steering/vectors")[0] == 503
    assert len(replicas.calls) == 1


def test_a_stream_that_loses_its_replica_says_so_and_another_answer_breaks_off() -> None:
    status, _, body = asked(Replicas((EVENTS, b"data: {}\n\n", ActorDiedError())))
    first, last, rest = body.decode().split("\n\n")
    assert (status, first, rest) == (200, "data: {}", "")
    assert code(last.removeprefix("data: ").encode()) == "replica_lost"
    with pytest.raises(ActorDiedError):
        asked(Replicas((JSON, b"{", ActorDiedError())))


def test_before_the_first_replica_the_model_loads() -> None:
    status, headers, body = asked(Replicas(populated=False))
    assert (status, headers[b"retry-after"], code(body)) == (503, b"2", "model_loading")


def test_a_failure_of_another_kind_is_a_500_and_tells_nothing_of_the_inside() -> None:
    status, _, body = asked(Replicas((RuntimeError("secret"),)))
    assert (status, code(body)) == (500, "internal_error")
    assert b"secret" not in body


def test_a_body_that_is_too_long_is_cut_one_byte_beyond() -> None:
    replicas = Replicas((JSON,))
    asked(replicas, body=b"x" * 3000, max_body=1024)
    assert len(replicas.calls[0].body) == 1025


def test_a_body_that_does_not_come_is_a_408() -> None:
    status, _, body = asked(Replicas(), body=b"slow", read_timeout=0.05)
    assert (status, code(body)) == (408, "request_timeout")


def test_health_is_that_of_all_that_answer() -> None:
    ready = Whole("a", JSON, b'{"status": "ready"}')
    status, _, body = asked(Replicas(wholes=(ActorDiedError(), ready)), "GET", "/ready")
    assert (status, json.loads(body)) == (200, {"status": "ready", "replicas": {"a": {"status": "ready"}}})


def test_what_the_front_refuses_is_counted() -> None:
    replica = Whole("a", AnswerHead(200, ()), b"# TYPE up gauge\nup 1.0\n")
    front = Front(Replicas((RuntimeError("of the inside"),), wholes=(replica,)), Settings())
    assert through(front)[0] == 500
    lines = through(front, "GET", "/metrics")[2].decode().splitlines()
    assert 'helmsight_refusals_total{reason="internal_error",replica="front",status="500"} 1.0' in lines
    assert 'helmsight_requests_total{method="other",replica="front",route="unread",status="500"} 1.0' in lines
    assert 'up{replica="a"} 1.0' in lines
