"""A client of several requests waits once: later ones precede newcomers, and are answered while the engine drains."""

from __future__ import annotations

import threading
import time

import pytest

from steering import Busy, Engine, Fault, Request, Sampling, Turn, measure
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.inside import sequences
from tests.waiting import PATIENCE, wait_for

FAMILY = "qwen2_vl"


def request(tokens: int = 3) -> Request:
    return Request(families.example_messages(FAMILY, 1), Sampling(max_tokens=tokens, ignore_eos=True))


def test_what_follows_in_a_turn_goes_before_newcomers_but_the_first_behind_them(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=1)
    with engine.turn() as turn:
        early = engine.submit(request())
        turn.generate([request()])
        assert early.done
        late = [engine.submit(request()) for _ in range(5)]
        turn.generate([request(), request()])
        assert not any(sequences(one)[0].tokens for one in late)
        last = turn.submit(request())
        engine.result_of(last)
        assert not any(sequences(one)[0].tokens for one in late)
    for one in late:
        engine.result_of(one)


def test_two_turns_take_their_places_in_the_order_they_ask_in(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=1)
    with engine.turn() as one, engine.turn() as two:
        one.generate([request()])
        two.generate([request()])
        first, second = one.submit(request()), two.submit(request())
        assert list(engine.core.scheduler.waiting) == [*sequences(first), *sequences(second)]
        engine.result_of(second)
        assert first.done


def test_a_full_queue_refuses_a_turn_at_first_and_then_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=1, max_waiting=1)
    with engine.turn() as turn:
        turn.generate([request()])
        waiting = [engine.submit(request()) for _ in range(2)]
        with pytest.raises(Busy):
            engine.submit(request())
        with engine.turn() as other, pytest.raises(Busy):
            other.generate([request()])
        turn.generate([request()])
    for one in waiting:
        engine.result_of(one)


def test_measuring_in_a_turn_does_not_wait_behind_those_who_keep_coming(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=1)
    engine.start()
    ended = threading.Event()
    answered: list[int] = []

    def client() -> None:
        while not ended.is_set():
            engine.submit(request(4)).result()
            answered.append(1)

    clients = [threading.Thread(target=client) for _ in range(12)]
    for one in clients:
        one.start()
    try:
        wait_for(lambda: len(answered) >= 12)
        part = {"type": "text", "text": "Text context: the ball is red.\nWhat is the ball?"}
        chat = [{"role": "user", "content": [{"type": "image", "image": families.example_image(0)}, part]}]
        before = len(answered)
        with engine.turn() as turn:
            measure(turn, [chat])
        assert len(answered) - before <= 14  # those who were there before it, and those who ran
    finally:
        ended.set()
        for one in clients:
            one.join()
        engine.stop()


def stopped_between(engine: Engine, turn: Turn, drain: float) -> threading.Thread:
    """Begin to stop an engine after a turn's first answer."""
    engine.start()
    turn.generate([request()])
    stopper = threading.Thread(target=engine.stop, args=(drain,))
    stopper.start()
    wait_for(lambda: not engine.healthy)
    return stopper


def test_a_draining_engine_answers_the_rest_of_a_turn_and_then_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY)
    with engine.turn() as turn:
        stopper = stopped_between(engine, turn, PATIENCE)
        time.sleep(0.1)
        with pytest.raises(Fault, match="shutting down"):
            engine.submit(request())
        with engine.turn() as other, pytest.raises(Fault, match="shutting down"):
            other.submit(request())
        turn.generate([request()])
        last = turn.submit(request())
    assert len(last.result().choices) == 1
    stopper.join(PATIENCE)
    assert not stopper.is_alive()


def test_a_turn_that_never_goes_on_holds_the_end_no_longer_than_the_grace(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY)
    with engine.turn() as turn:
        stopper = stopped_between(engine, turn, 0.3)
        stopper.join(PATIENCE)
        assert not stopper.is_alive()
        with pytest.raises(Fault, match="shutting down"):
            turn.submit(request())
