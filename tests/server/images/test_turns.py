"""The order in which requests' pictures are prepared, and refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from server.engine.runtime import Serving
from server.images.turns import PictureTurns
from server.settings import Settings
from steering import Busy
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE


class Queue:
    """Threads that take turns; `order` are the names of those that had one."""

    def __init__(self, turns: PictureTurns):
        self.turns = turns
        self.order: list[str] = []
        self.errors: list[Exception] = []
        self.threads: list[threading.Thread] = []

    def ask(self, name: str, check: Callable[[], object] = lambda: None, large: bool = False) -> None:
        def go() -> None:
            try:
                with self.turns.turn(name[0], check, large):
                    self.order.append(name)
            except Exception as error:
                self.errors.append(error)

        waiting = sum(map(len, self.turns._waiting.values()))
        self.threads.append(threading.Thread(target=go))
        self.threads[-1].start()
        while sum(map(len, self.turns._waiting.values())) == waiting and self.threads[-1].is_alive():
            time.sleep(0.001)

    def end(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextmanager
def taken(turns: PictureTurns, count: int) -> Iterator[None]:
    """Hold `count` turns for the duration of the context."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(turns.turn("busy"))
        yield


def test_groups_get_turns_however_many_each_has_waiting() -> None:
    queue = Queue(turns := PictureTurns(1, most=16))
    with taken(turns, 1):
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            queue.ask(name)
        assert queue.order == []
    queue.end()
    assert queue.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_so_many_are_at_work_at_once() -> None:
    turns = PictureTurns(2)
    with taken(turns, 2):
        queue = Queue(turns)
        queue.ask("a1")
        assert queue.order == []
    queue.end()
    assert queue.order == ["a1"]
    with taken(turns, 2):  # all places were given back
        pass


def test_who_need_wait_no_longer_leaves_and_others_go_on() -> None:
    queue, gone = Queue(turns := PictureTurns(1)), threading.Event()

    def check() -> None:
        if gone.is_set():
            raise ConnectionError("gone")

    with taken(turns, 1):
        queue.ask("a1", check)
        queue.ask("a2")
        gone.set()
        queue.threads[0].join(PATIENCE)
        assert [type(error) for error in queue.errors] == [ConnectionError]
    queue.end()
    assert queue.order == ["a2"]


def test_large_ones_share_half_of_the_places_and_delay_no_others() -> None:
    turns = PictureTurns(2, longest=0.5)
    queue = Queue(turns)
    turns._seconds[True] = 0.4
    with turns.turn("a", large=True):
        queue.ask("a1", large=True)
        assert queue.order == [], "the other place is for small ones"
        with turns.turn("a"):
            assert turns.held == 3
        queue.ask("a2")
        queue.ask("b1")
        assert queue.order == ["a2", "b1"]
        with pytest.raises(Busy), turns.turn("b", large=True):
            pass
    queue.end()
    assert queue.order == ["a2", "b1", "a1"]


def test_more_than_the_most_are_refused_and_one_group_cannot_take_all_places() -> None:
    queue = Queue(turns := PictureTurns(1, most=8))
    with taken(turns, 1):
        for number in range(8):
            queue.ask(f"a{number}")
        assert [type(error) for error in queue.errors] == [Busy], "one of 8 places is kept for others"
        queue.ask("b1")
        refusal = "8 answers are already waiting, and no more may; try again in about 1 second"
        with pytest.raises(Busy, match=refusal), turns.turn("c"):
            pass
    queue.end()
    assert queue.order[:2] == ["a0", "b1"]
    assert len(queue.order) == 8


def test_who_would_wait_too_long_is_refused() -> None:
    turns = PictureTurns(1, longest=0.02)
    with turns.turn():
        time.sleep(0.05)
    with turns.turn(), pytest.raises(Busy, match=r"longer than 0\.02 seconds"), turns.turn():
        pass
    with turns.turn():  # nobody is before it
        pass


def test_a_server_has_places_for_as_many_as_it_has_slots_and_as_may_wait_for_one() -> None:
    turns = Serving.of(FakeEngine(), Settings(slots=4, max_waiting=8, vectors=())).pictures  # type: ignore[arg-type]
    queue = Queue(turns)
    with taken(turns, turns._places[0]):
        for number in range(4 + 8 + 1):
            queue.ask(f"{number:x}")  # each of a group of its own
    queue.end()
    assert (len(queue.order), [type(error) for error in queue.errors]) == (12, [Busy])
