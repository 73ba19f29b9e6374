"""Failures that may pass are retried; persistent ones are errors in the server's words."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from probes.answering import endpoint
from probes.answering.base import Reply
from probes.answering.endpoint import Endpoint
from probes.harness.ledger import Remembering
from tests.probes.answering.scripted_server import HELMSIGHT, Answer, Server, asked, cut_off, echo, failed, said
from tests.waiting import PATIENCE, wait_for


def play(server: Server, *answers: Answer) -> None:
    """Answer with these, the last one again and again."""
    rest = iter(answers)
    server.answer = lambda body: next(rest, answers[-1])


@pytest.mark.parametrize(
    "first", [failed(429, Retry_After="0"), *map(failed, (500, 502, 503, 504)), (0, {}, b""), cut_off("Well, ")]
)
def test_what_may_pass_is_tried_again(server: Server, first: Answer) -> None:
    play(server, first, first, said("well"))
    assert list(Endpoint(server.url).answers([asked("?")])) == [Reply("well")]
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


def test_the_server_says_how_long_to_wait(server: Server) -> None:
    play(server, failed(429, Retry_After="1"), said("well"))
    begun = time.monotonic()
    assert list(Endpoint(server.url).answers([asked("?")])) == [Reply("well")]
    assert time.monotonic() - begun >= 1.0


@pytest.mark.parametrize(
    ("answer", "attempts", "message"),
    [
        (failed(503, "Still loading."), 6, "status 503: Still loading."),
        (failed(500, "x" * 400), 6, "status 500: " + "x" * 300 + "$"),
        (failed(400, "Unsupported parameter: 'max_tokens'."), 1, r"status 400: Unsupported parameter: 'max_tokens'\."),
        ((500, {}, b"a\n\nb"), 6, "status 500: a b"),
        ((500, {}, {"error": "odd"}), 6, "status 500: .*odd"),
        ((200, {}, b"{"), 1, "not JSON: {"),
        ((200, {}, b"[" * 100_000), 1, r"not JSON: \["),
        ((200, {}, []), 1, "did not answer with a chat completion"),
        ((200, {}, {"choices": []}), 1, "did not answer with a chat completion"),
        ((200, {}, {"choices": [{"message": {"content": 5}}]}), 1, "did not answer with a chat completion"),
        ((0, {}, b""), 3, "/chat/completions did not answer: "),
        (cut_off("Well, "), 3, "/chat/completions did not answer: "),
    ],
)
def test_what_stays_wrong_is_an_error_with_the_servers_words(
    server: Server, answer: Answer, attempts: int, message: str
) -> None:
    there = Endpoint(server.url)
    play(server, answer)
    with pytest.raises(ValueError, match=message):
        list(there.answers([asked("?")]))
    assert len(server.bodies) == attempts


def test_numbers_that_a_helmsight_server_leaves_out_are_an_error(server: Server) -> None:
    server.models = [HELMSIGHT]
    server.answer = lambda body: said("x", diagnostics=None)
    with pytest.raises(ValueError, match="left out measured values"):
        list(Endpoint(server.url).answers([asked("?")]))


def test_a_server_that_is_not_there_is_an_error() -> None:
    with Server() as gone:
        url = gone.url
    with pytest.raises(ValueError, match=f"{url}/v1/models did not answer: .*refused"):
        Endpoint(url)


def test_a_server_that_takes_too_long_is_an_error(server: Server) -> None:
    over = threading.Event()
    server.answer = lambda body: said("late" if over.wait(PATIENCE) else "never")
    there = Endpoint(server.url)
    there.timeout = 0.5
    with pytest.raises(ValueError, match="timed out"):
        list(there.answers([asked("?")]))
    over.set()
    wait_for(lambda: len(server.bodies) == 3)


def test_where_a_server_fails_for_good_the_error_says_what_is_kept(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    server.answer = lambda body: failed(500, "No.") if body["messages"][0]["content"] == "c" else echo(body)
    texts = [asked(text) for text in "abcd"]
    kept = rf"status 500: No\. 2 answers are kept in {path}: run the same command again to continue\.$"
    with pytest.raises(ValueError, match=kept):
        list(Remembering(Endpoint(server.url, concurrency=1), path).answers(texts))
    with pytest.raises(ValueError, match=r"status 500: No\.$"):
        list(Remembering(Endpoint(server.url), tmp_path / "empty.jsonl").answers([asked("c")]))
    server.answer = echo
    server.bodies.clear()
    assert [one.text for one in Remembering(Endpoint(server.url), path).answers(texts)] == [*"abcd"]
    assert len(server.bodies) == 2


def test_an_answer_that_is_too_long_is_not_read_to_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LARGEST", 5_000)
    there = Endpoint(server.url)
    play(server, said("x" * 4_000))
    assert list(there.answers([asked("?")])) == [Reply("x" * 4_000)]
    play(server, said("x" * 6_000))
    with pytest.raises(ValueError, match="its answer takes more than 5000 bytes"):
        list(there.answers([asked("?")]))


def test_an_answer_that_comes_byte_by_byte_has_an_end(server: Server) -> None:
    there = Endpoint(server.url)
    there.timeout = 1.0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

        def drip() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while True:
                    connection.sendall(b"1\r\n \r\n")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(ValueError, match="its answer takes more than the time that an answer has"):
            list(there.answers([asked("?")]))
