"""Several questions are under way at a time, as many as stated; replies keep their order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from probes.answering import endpoint
from probes.answering.base import Question, Reply
from probes.answering.endpoint import Endpoint
from tests.probes.answering.scripted_server import Answer, Server, asked, echo, failed, numbered, threads
from tests.waiting import PATIENCE


def test_replies_keep_the_order_though_later_ones_come_first(server: Server) -> None:
    last_is_there = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        number = body["messages"][0]["content"]
        assert number != "0" or last_is_there.wait(PATIENCE)
        if number == "3":
            last_is_there.set()
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=4).answers(itertools.islice(numbered(), 4))
    assert [reply.text for reply in replies] == ["0", "1", "2", "3"]


def test_as_many_as_stated_are_under_way(server: Server) -> None:
    together = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> Answer:
        together.wait(PATIENCE)  # broken, and the answer an error, unless three come together
        time.sleep(0.03)  # for a fourth, if there is one
        return echo(body)

    server.answer = answer
    assert len(list(Endpoint(server.url, concurrency=3).answers(itertools.islice(numbered(), 12)))) == 12
    assert server.most_at_once == 3


def test_questions_are_taken_as_they_are_needed(server: Server) -> None:
    taken: list[Question] = []

    def endless() -> Iterator[Question]:
        for question in numbered():
            taken.append(question)
            if len(taken) == 4:
                threading.Timer(0.2, hold.set).start()
            yield question

    hold = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        assert hold.wait(PATIENCE)
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=2).answers(endless())
    assert taken == []
    assert next(replies) == Reply("0")
    assert len(taken) == 4  # none was answered before
    for number in range(1, 20):
        assert next(replies) == Reply(str(number))
        assert len(taken) <= number + 4
    replies.close()
    assert threads() == []


def test_a_reply_does_not_wait_for_the_questions_behind_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Future[Reply]] = []

    class Noted(ThreadPoolExecutor):
        def submit(self, *given: Any) -> Any:
            begun.append(super().submit(*given))
            return begun[-1]

    monkeypatch.setattr(endpoint, "ThreadPoolExecutor", Noted)

    def slow() -> Iterator[Question]:
        yield asked("0")
        begun[0].result(PATIENCE)
        yield asked("1")
        raise AssertionError("0 was to be handed over before")

    replies = Endpoint(server.url, concurrency=2).answers(slow())
    assert next(replies) == Reply("0")
    replies.close()


def test_after_a_failure_only_those_under_way_are_finished(server: Server) -> None:
    over = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        number = body["messages"][0]["content"]
        if number == "1":
            time.sleep(0.1)  # so that 2 to 4 are there
            return failed(400, "bad")
        assert number == "0" or over.wait(PATIENCE)
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=2).answers(numbered())
    assert next(replies) == Reply("0")
    threading.Timer(0.5, over.set).start()
    with pytest.raises(ValueError, match="status 400: bad"):
        next(replies)
    assert threads() == []
    assert {body["messages"][0]["content"] for body in server.bodies} <= {"0", "1", "2", "3"}  # 4 had not begun
    assert list(replies) == []
