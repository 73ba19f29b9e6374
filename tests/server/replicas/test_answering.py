"""An application that answers calls: the same answers as over HTTP, as they come, no more of them than are listened to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from server.app import create_app
from server.replicas.answering import HELD, Answering
from server.replicas.call import AnswerHead, Call
from server.settings import Settings
from tests.server.conftest import data_uri, user
from tests.server.fakes import FakeEngine
from tests.server.replicas.loops import ran
from tests.waiting import wait_for

HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))


def chat(**fields: Any) -> Call:
    body = json.dumps({"messages": [user(data_uri(), "Describe the picture.")], **fields}).encode()
    return Call("POST", "/v1/chat/completions", headers=HEADERS, body=body)


def whole(app: Any, call: Call) -> tuple[AnswerHead, bytes]:
    answering = Answering(app, Settings(slots=2))
    try:
        return ran(answering.whole(call))
    finally:
        answering.end()


def test_an_answer_is_the_one_that_http_gives(app: Flask, client: FlaskClient) -> None:
    head, body = whole(app, chat(max_tokens=6, temperature=0))
    assert (head.status, dict(head.headers)["Content-Type"]) == (200, "application/json")
    same = client.post("/v1/chat/completions", data=chat(max_tokens=6, temperature=0).body, headers=dict_of(HEADERS))
    assert json.loads(body)["choices"] == same.json["choices"]
    head, _ = whole(app, Call("GET", "/nothing", headers=HEADERS))
    assert head.status == 404


def dict_of(headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def test_a_stream_comes_as_it_is_made_and_ends_with_its_listener(fake: FakeEngine) -> None:
    fake.script = ("one", threading.Event(), "never")
    app = create_app(Settings(journal="off"), engine=fake)
    answering = Answering(app, Settings(slots=2))

    async def listen() -> bytes:
        pieces = answering.answer(chat(stream=True))
        heard = b""
        assert isinstance(await anext(pieces), AnswerHead)
        while b"one" not in heard:
            piece = await anext(pieces)
            assert isinstance(piece, bytes)
            heard += piece
        await pieces.aclose()  # as when Ray Serve cancels the call of a client that left
        return heard

    assert b"never" not in ran(listen())
    wait_for(fake.completions[0].cancelled.is_set)
    answering.end()


def test_who_listens_slowly_is_waited_for_and_who_leaves_is_not() -> None:
    made, closed = [], threading.Event()

    def app(environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        try:
            for number in range(10 * HELD):
                made.append(number)
                yield b"x"
        finally:
            closed.set()

    answering = Answering(app, Settings(slots=2))

    async def listen() -> None:
        pieces = answering.answer(Call("GET", "/"))
        await anext(pieces)
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert len(made) <= 2 * HELD + 2
        await pieces.aclose()
        assert await asyncio.to_thread(closed.wait, 10)

    ran(listen())
    answering.end()


def test_bytes_arrive_whole_and_in_order() -> None:
    def app(environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [("X-A", "1")])
        return (str(number).encode() for number in range(3000))

    head, body = whole(app, Call("GET", "/"))
    assert head == AnswerHead(200, (("X-A", "1"),))
    assert body == b"".join(str(number).encode() for number in range(3000))


def test_an_application_that_breaks_ends_its_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    def app(environ: Any, start: Any) -> Any:
        raise ValueError("inside")

    with pytest.raises(RuntimeError, match="could not be answered"):
        whole(app, Call("GET", "/"))
    assert "a request could not be answered" in caplog.text
