"""Log-probabilities with alternatives, up to a hundred thousand of an answer, on their way from the engine's process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from steering import Request, Sampling
from steering.child.link import Link
from tests.steering.child.conftest import alone
from tests.steering.child.test_apart import Make, ask
from tests.steering.parallel.asking import chat


def test_log_probabilities_are_sent_once(apart: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pieces of a stream, or with the whole answer; none of it is put by the thread that steps."""
    there = apart()
    sent: Counter[int] = Counter()
    putting: set[str] = set()
    send = Link.send

    def noted(link: Link, message: list[Any]) -> None:
        for part in message:
            if isinstance(part, list) and part[0] == "output":
                assert len(part[2].tokens) == len(part[2].logprobs)
                putting.add(threading.current_thread().name)
                sent[part[1]] += len(part[2].logprobs)
        send(link, message)

    monkeypatch.setattr(Link, "send", noted)
    request = Request(chat(), Sampling(max_tokens=9, ignore_eos=True, logprobs=3), n=2)
    (expected,) = alone(there).generate([request])
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    streamed = ask(there.engine, request)
    for chunk in streamed:
        pieces[chunk.index] += chunk.logprobs
    whole = ask(there.engine, request)
    for number, found in enumerate((streamed.result(), whole.result())):
        for choice, other in zip(found.choices, expected.choices, strict=True):
            assert choice.logprobs == other.logprobs, number
    assert [tuple(one) for one in pieces.values()] == [choice.logprobs for choice in expected.choices]
    assert set(sent.values()) == {18}
    assert putting
    assert all(name.startswith("helmsight-answers") for name in putting), putting
