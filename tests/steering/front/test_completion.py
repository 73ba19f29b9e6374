"""The ways to wait for an answer: piece by piece, for its end, or not at all."""

from __future__ import annotations

import threading

import pytest

from steering import Engine, Fault, Request
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import conversations, greedy
from tests.steering.inside import sequences


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine("qwen2_vl", slots=4)


def test_what_does_not_wait_comes_to_the_same(engine: Engine) -> None:
    chat = conversations("qwen2_vl")[0]
    completion = engine.submit(Request(chat, greedy(5), n=2, baseline=True))
    called: list[None] = []
    chunks = completion.paused(lambda: called.append(None))
    assert next(chunks) is None
    assert not called
    heard = []
    for chunk in chunks:
        if chunk is None:
            before = len(called)
            engine.step()
            assert len(called) > before
        else:
            heard.append(chunk)
    expected = [*engine.generate([Request(chat, greedy(5), n=2, baseline=True)])[0].choices]
    for index in range(2):
        assert "".join(chunk.text for chunk in heard if chunk.index == index) == expected[index].text
        assert completion.text_of(index) == expected[index].text
    assert completion.result().choices[0].token_ids == expected[0].token_ids


def test_who_waits_for_the_end_is_not_woken_before(engine: Engine) -> None:
    chat = conversations("qwen2_vl")[0]
    completion = engine.submit(Request(chat, greedy(6)))
    chunks = completion.whole()
    while not completion.done:
        assert completion._outputs.empty()
        engine.step()
    (last,) = chunks
    assert last.choice is not None
    assert last.choice.timing is not None
    assert last.choice.timing.first == completion.first_at
    assert len(last.choice.token_ids) == 6


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["each", "whole", "paused"])
def test_whoever_waits_hears_that_it_was_cancelled_or_failed(engine: Engine, way: str, fails: bool) -> None:
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(20)))
    woken = threading.Event()
    ways = {"each": completion.__iter__, "whole": completion.whole, "paused": lambda: completion.paused(woken.set)}
    heard = ways[way]()
    engine.step()
    if fails:
        sequences(completion)[0].error = Fault("it broke")
    else:
        completion.cancel()
    engine.step()
    if fails:
        with pytest.raises(Fault, match="it broke"):
            list(heard)
    else:
        assert all(chunk is not None and chunk.choice is None for chunk in heard)
    assert woken.is_set() == (way == "paused")
