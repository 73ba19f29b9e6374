"""Log-probabilities with alternatives, up to a hundred thousand of an answer, on their way from the engine's process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from server.engine_process.link import Link
from steering import Request, Sampling
from tests.server.engine_process.test_apart import Make, ask
from tests.steering.parallel.asking import chat


def test_log_probabilities_are_sent_once(apart: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pieces of a stream, or with the whole answer; none of it is put by the thread that steps."""
    there = apart()
    last: dict[int, Any] = {}
    putting: set[str] = set()
    send = Link.send

    def noted(link: Link, message: list[Any]) -> None:
        for part in message:
            if isinstance(part, list) and part[0] == "chunk":
                putting.add(threading.current_thread().name)
                last[part[1]] = part[2]
        send(link, message)

    monkeypatch.setattr(Link, "send", noted)
    request = Request(chat(), Sampling(max_tokens=9, ignore_eos=True, logprobs=3), n=2)
    (expected,) = there.own.generate([request])
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    streamed = ask(there.engine, request)
    for chunk in streamed:
        pieces[chunk.index] += chunk.logprobs
    whole = ask(there.engine, request)
    for number, found in enumerate((streamed.result(), whole.result())):
        for choice, other in zip(found.choices, expected.choices, strict=True):
            assert choice.logprobs == other.logprobs, number
    assert [tuple(one) for one in pieces.values()] == [choice.logprobs for choice in expected.choices]
    assert next(iter(last.values())).choice.logprobs == ()
    assert putting
    assert all(name.startswith("helmsight-answers") for name in putting), putting
