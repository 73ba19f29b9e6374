"""Groups get slots in turns, however many answers each has waiting; without groups, whoever came first is first."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steering import Busy, Completion, Engine, Request, Sampling
from steering.core.scheduler import Scheduler
from steering.protocol.sequence import QueuePlace, Sequence, Spec
from tests import families
from tests.steering.conftest import MakeEngine


class Line:
    """A scheduler of one slot whose answers end at once. `came` has the label of each waiting sequence."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1, 1, lambda *_: None)
        self.came: dict[Sequence, str] = {}
        self._count: Counter[str] = Counter()

    def ask(self, group: str, n: int = 1, waited: bool = False) -> list[Sequence]:
        """Queue a request of so many answers, called A0, A1, ... in the group A."""
        prompt = cast(Any, SimpleNamespace(length=1))
        made = [Sequence(Spec(prompt), queue=QueuePlace(group, waited)) for _ in range(n)]
        for sequence in made:
            self.came[sequence] = f"{group}{self._count[group]}"
            self._count[group] += 1
        self.scheduler.enqueue(made)
        return made

    def next(self, count: int = 1) -> list[str]:
        """Return the groups that get the slot, that many times."""
        got = []
        for _ in range(count):
            (sequence,) = self.scheduler.next_prefill(lambda _: True)
            self.scheduler.prefilled(sequence)
            self.scheduler.release(sequence)
            got.append(self.came[sequence])
        return got


def test_the_first_of_a_group_does_not_wait_behind_all_of_another() -> None:
    line = Line()
    for _ in range(60):
        line.ask("A")
    assert line.next(3) == ["A0", "A1", "A2"]
    for group in "BBC":
        line.ask(group)
    assert line.next(6) == ["B0", "C0", "A3", "B1", "A4", "A5"]
    assert line.next(54) == [f"A{i}" for i in range(6, 60)]


def test_without_groups_whoever_came_first_is_first() -> None:
    draw, line, expected = random.Random(0), Line(), 0
    for _ in range(300):
        if draw.random() < 0.5:
            line.ask("", draw.randint(1, 3))
        elif line.scheduler.waiting:
            assert line.next() == [str(expected)]
            expected += 1
    assert line.next(len(line.scheduler.waiting)) == [str(i) for i in range(expected, line._count[""])]


def test_whoever_asks_again_at_once_is_not_always_first() -> None:
    line = Line()
    for _ in range(5):
        line.ask("A")
    line.next()
    order = []
    for _ in range(4):
        line.ask("B")
        order += line.next(2)
    assert "".join(name[0] for name in order) == "BABABABA"


def test_the_answers_of_a_request_stay_together_and_each_counts() -> None:
    line = Line()
    line.ask("A", n=3)
    line.ask("A")
    for _ in range(5):
        line.ask("B")
    assert line.next(9) == ["A0", "A1", "A2", "B0", "B1", "B2", "A3", "B3", "B4"]


def test_what_was_cancelled_while_it_waited_does_not_count() -> None:
    line = Line()
    cancelled = [line.ask("A")[0] for _ in range(20)]
    for _ in range(10):
        line.ask("B")
    for sequence in cancelled:
        line.scheduler.release(sequence)
    assert line.next() == ["B0"]
    line.ask("A")
    assert line.next(2) == ["A20", "B1"]


def test_what_has_waited_in_anothers_place_goes_before_all_groups() -> None:
    line = Line()
    for group in "AB":
        line.ask(group)
    line.ask("C", n=2, waited=True)
    assert line.next(4) == ["C0", "C1", "A0", "B0"]


def test_any_history_gives_groups_that_wait_equal_shares() -> None:
    """The bound of start-time fair queueing: of two groups that both wait, none is ahead by more than one turn each."""
    for seed in range(10):
        draw, line, served = random.Random(seed), Line(), Counter[str]()
        for group in "ABC":
            for _ in range(draw.randint(40, 60)):
                line.ask(group)
        for _ in range(90):
            if draw.random() < 0.3:
                line.ask(draw.choice("ABC"))
            served[line.next()[0][0]] += 1
        assert max(served.values()) - min(served.values()) <= 1


def test_the_engine_answers_groups_in_turns(make_engine: MakeEngine) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=1, max_waiting=16)
    request = Request(families.example_messages("qwen2_vl", 1), Sampling(max_tokens=2, ignore_eos=True))

    def ask(group: str) -> Completion:
        with engine.turn(group) as turn:
            return turn.submit(request)

    many = [ask("many") for _ in range(6)]
    engine.step()
    one = ask("one")
    engine.result_of(one)
    assert [completion.done for completion in many] == [True, *[False] * 5]
    assert all(engine.result_of(completion).choices for completion in many)


def test_one_group_does_not_fill_the_queue(make_engine: MakeEngine) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=1, max_waiting=16)
    request = Request(families.example_messages("qwen2_vl", 1), Sampling(max_tokens=1))

    def ask(group: str) -> Completion:
        with engine.turn(group) as turn:
            return turn.submit(request)

    taken = [ask("many") for _ in range(15)]  # a slot, and 16 - 16 / 8 places
    with pytest.raises(Busy):
        ask("many")
    others = [ask(group) for group in ("one", "two")]
    with pytest.raises(Busy):
        ask("many")
    for completion in (*taken, *others):
        engine.result_of(completion)
    plain = [engine.submit(request) for _ in range(17)]  # without groups all places are anyone's
    with pytest.raises(Busy):
        engine.submit(request)
    for completion in plain:
        completion.cancel()


def taken_of(engine: Engine, group: str, asked: int, n: int = 1) -> list[Completion]:
    """Return the accepted requests out of those that a group submits at once."""
    request = Request(families.example_messages("qwen2_vl", 1), Sampling(max_tokens=1), n=n)
    taken = []
    for _ in range(asked):
        with suppress(Busy), engine.turn(group) as turn:
            taken.append(turn.submit(request))
    return taken


def test_who_has_less_than_its_share_is_taken_although_the_queue_is_full(make_engine: MakeEngine) -> None:
    """A key holds 56 of 64 places, more than 32; the next may have more, as long as it leaves as many."""
    engine: Engine = make_engine("qwen2_vl", slots=4, max_waiting=64)
    groups = {group: taken_of(engine, group, 100) for group in ("many", "few", "later", "last")}
    assert [len(taken) for taken in groups.values()] == [60, 20, 10, 5]
    assert engine.stats()["waiting"] - 4 <= 64 + 32, "what gets slots in the next step waits for none"
    for completion in groups["many"][:50]:
        completion.cancel()
    engine.step()
    assert taken_of(engine, "few", 100), "the queue has room again"
    for waiting in groups.values():
        for completion in waiting:
            completion.cancel()


def test_every_answer_of_a_request_counts(make_engine: MakeEngine) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=3, max_waiting=16)
    many, few = taken_of(engine, "many", 30), taken_of(engine, "few", 20, n=3)
    assert (len(many), len(few)) == (17, 2), "six of ten that were left, where nine would be more than four"
    assert [len(taken_of(engine, group, 20)) for group in "abcd"] == [2, 1, 1, 0]
    for completion in (*many, *few):
        completion.cancel()


def test_where_all_have_their_share_the_queue_is_as_long_as_it_may_be(make_engine: MakeEngine) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=1, max_waiting=16)
    taken = [one for group in "abcd" for one in taken_of(engine, group, 4 + (group == "a"))]
    assert len(taken) == 17
    assert not taken_of(engine, "a", 1)
    for completion in taken:
        completion.cancel()
