"""Requests that the worker passes on to the engine process after a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from steering import Busy
from steering.child.refusals import FORGOTTEN, PROBED, RefusalEstimate
from steering.errors import RequestError

FULL = Busy(8, 3.5)


@dataclass
class Clock:
    """A time that passes when it is told to."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def passes(ask: Callable[[], object]) -> bool:
    """Return whether a request passes.

    One that does not is refused like the one before it, by an error of its own.
    """
    refused: Busy | None = None
    try:
        ask()
    except Busy as busy:
        refused = busy
    assert refused is not FULL
    assert refused is None or (str(refused), refused.retry_after) == (str(FULL), FULL.retry_after)
    return refused is None


def test_all_pass_until_one_is_refused(clock: Clock) -> None:
    room = RefusalEstimate()
    assert all(passes(lambda: room.take("", 1)) for _ in range(100))
    room.answered("", 1, FULL)
    assert not passes(lambda: room.check(""))
    assert not passes(lambda: room.take("", 1))
    assert passes(lambda: room.take("another", 1)), "each group has its own places"


def test_as_many_pass_as_have_ended(clock: Clock) -> None:
    room = RefusalEstimate()
    room.answered("", 1, FULL)
    room.ended(2)
    assert all(passes(lambda: room.check("")) for _ in range(3)), "who only looks takes none"
    assert [passes(lambda: room.take("", 1)) for _ in range(3)] == [True, True, False]
    room.answered("", 1, [7, 4])
    room.answered("", 1, RequestError("wrong"))
    assert [passes(lambda: room.take("", 1)) for _ in range(2)] == [True, False], "what was wrong took no place"
    room.ended(1)
    assert [passes(lambda: room.take("", 3)), passes(lambda: room.take("", 1))] == [True, False]


def test_one_finds_whether_there_is_room_again(clock: Clock) -> None:
    room = RefusalEstimate()
    room.answered("", 1, FULL)
    clock.now += 1.01 * PROBED
    assert [passes(lambda: room.take("", 1)) for _ in range(2)] == [True, False]
    room.answered("", 1, FULL)
    assert not passes(lambda: room.take("", 1)), "it was refused: another moment without any"
    clock.now += 1.01 * PROBED
    assert passes(lambda: room.take("", 1))
    room.answered("", 1, [7, 4])
    assert all(passes(lambda: room.take("", 1)) for _ in range(100)), "it was taken"


def test_a_refusal_is_forgotten(clock: Clock) -> None:
    room = RefusalEstimate()
    room.answered("", 1, FULL)
    clock.now += 1.01 * PROBED
    assert passes(lambda: room.take("", 1))  # of which nothing is heard
    clock.now += FORGOTTEN - PROBED
    assert all(passes(lambda: room.take("", 1)) for _ in range(100))


def test_that_many_answers_did_not_fit_tells_nothing_of_one(clock: Clock) -> None:
    room = RefusalEstimate()
    room.answered("", 3, FULL)
    assert passes(lambda: room.take("", 1))
