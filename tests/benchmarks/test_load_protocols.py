"""The load benchmark asks the same chats in each protocol of a server, and reads its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from werkzeug.serving import make_server

from benchmarks.load.client import Load, Server
from benchmarks.load.protocols import PROTOCOLS
from benchmarks.load.run import body_of, named_protocol
from benchmarks.load.send import send
from benchmarks.load.workloads import WORKLOADS
from server.app import create_app
from server.settings import Settings
from steering import TextBounds
from tests.server.fakes import FakeEngine


@pytest.fixture
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine("one", " two", " three")
    engine.can(context_length=1024, text=TextBounds(1024, 16_384, 1024))
    server = make_server("127.0.0.1", 0, create_app(Settings(journal="off"), engine=engine), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield engine, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_all_protocols_ask_the_same_and_see_the_same(served: tuple[FakeEngine, str]) -> None:
    engine, url = served
    workloads, asked = ("shared", "picture"), {}
    for name in PROTOCOLS:
        engine.requests.clear()
        for stream in (True, False):
            bodies = [body_of(workload, 0, range(8, 9), stream) for workload in workloads]
            (first, second) = send(Server("a", url, "fake", protocol=name), Load(bodies, clients=1)).seen
            for request in (first, second):
                assert (request.status, request.tokens) == (200, 3), (name, request)
                assert (request.first is not None, len(request.gaps)) == ((True, 2) if stream else (False, 0))
        asked[name] = [
            (request.sampling, [
                (message["role"], [part.get("text") for part in message["content"]] if isinstance(message["content"], list)
                 else message["content"])
                for message in request.messages
            ])
            for request in engine.requests
        ]  # fmt: skip
    assert asked["responses"] == asked["messages"] == asked["chat"]
    assert len(asked["chat"]) == 4
    assert asked["chat"][0][1][0] == ("system", WORKLOADS["shared"](0)[0]["content"])


def test_protocols_are_named() -> None:
    assert named_protocol("a=messages") == ("a", "messages")
    with pytest.raises(Exception, match="one of chat, responses, messages"):
        named_protocol("a=grpc")
