"""Slots: running sequences fill the first ones without holes, whoever comes, leaves or fails."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steering.core.scheduler import Scheduler
from steering.protocol.sequence import PrefillState, Sequence, Spec


class World:
    """A scheduler with a pool of labels instead of tensors: what sits in a slot must be its sequence's."""

    def __init__(self, slots: int, budget: int):
        self.pool: list[Sequence | None] = [None] * slots
        self.moves: list[tuple[int, int, int]] = []
        self.scheduler = Scheduler(slots, budget, self._move)

    def _move(self, source: int, target: int, length: int) -> None:
        self.moves.append((source, target, length))
        self.pool[target] = self.pool[source]

    def submit(self, length: int, fork_of: Sequence | None = None) -> Sequence:
        prompt = cast(Any, SimpleNamespace(length=length))
        made = Sequence(Spec(prompt, max_tokens=9), prefill=PrefillState(fork_of))
        self.scheduler.waiting.append(made)
        return made

    def prefill(self, divisible: Any = lambda sequence: True) -> list[Sequence]:
        batch = self.scheduler.next_prefill(divisible)
        for sequence in batch:
            self.pool[sequence.slot] = sequence
        return batch

    def finish(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            sequence.computed = sequence.prompt.length
            self.scheduler.prefilled(sequence)

    def check(self) -> None:
        running, filling = self.scheduler.running, self.scheduler.filling
        assert [sequence.slot for sequence in running] == list(range(len(running)))
        for sequence in running:
            assert self.pool[sequence.slot] is sequence
        if filling is not None:
            assert filling.slot == len(running)
            assert self.pool[filling.slot] is filling
        for sequence in self.scheduler.waiting:
            assert sequence.slot == -1


def test_prompts_share_a_step_within_the_budget_padding_included() -> None:
    world = World(8, budget=30)
    sequences = [world.submit(length) for length in (10, 8, 9, 4)]
    assert world.prefill() == sequences[:3]  # 3 x 10, the fourth would make it 4 x 10
    assert [sequence.slot for sequence in sequences] == [0, 1, 2, -1]


def test_a_longer_prompt_widens_the_padding_of_the_others() -> None:
    world = World(8, budget=30)
    sequences = [world.submit(length) for length in (5, 5, 11)]
    assert world.prefill() == sequences[:2]


def test_a_prompt_longer_than_the_budget_runs_alone_and_stays_until_it_is_done() -> None:
    world = World(8, budget=30)
    long, short = world.submit(100), world.submit(5)
    assert world.prefill() == [long]
    assert world.prefill() == [long]
    assert world.scheduler.filling is long
    world.finish([long])
    assert world.prefill() == [short]
    assert short.slot == 1


def test_prompts_that_cannot_be_padded_run_alone() -> None:
    world = World(8, budget=100)
    sequences = [world.submit(5) for _ in range(4)]
    special = sequences[2]
    batches = []
    for _ in range(3):
        batch = world.prefill(lambda sequence: sequence is not special)
        world.finish(batch)
        batches.append(batch)
    assert batches == [sequences[:2], [special], sequences[3:]]


def test_no_more_sequences_than_slots() -> None:
    world = World(2, budget=100)
    sequences = [world.submit(5) for _ in range(3)]
    world.finish(world.prefill())
    assert world.prefill() == []
    world.scheduler.release(sequences[0])
    assert world.prefill() == [sequences[2]]
    world.check()


def test_who_leaves_is_replaced_by_the_last_and_then_by_the_one_in_prefill() -> None:
    world = World(4, budget=100)
    sequences = [world.submit(5) for _ in range(3)]
    world.finish(world.prefill())
    filling = world.submit(200)
    world.prefill()
    filling.computed = 60
    sequences[2].tokens = [1, 2, 3]
    world.scheduler.release(sequences[0])
    assert world.moves == [(2, 0, 5 + 2), (3, 2, 60)]
    assert world.scheduler.running == [sequences[2], sequences[1]]
    world.check()


def test_forks_wait_for_their_source_and_then_come_without_a_prefill() -> None:
    world = World(4, budget=100)
    source = world.submit(5)
    forks = [world.submit(5, fork_of=source) for _ in range(2)]
    assert world.scheduler.next_forks() == []
    assert world.prefill() == [source]
    source.prefill.logits = cast(Any, "logits")
    world.finish([source])
    assert world.scheduler.next_forks() == forks
    assert [fork.slot for fork in forks] == [1, 2]


def test_a_fork_whose_source_has_left_is_prefilled() -> None:
    world = World(1, budget=100)
    source = world.submit(5)
    fork = world.submit(5, fork_of=source)
    world.finish(world.prefill())
    source.prefill.logits = cast(Any, "logits")
    world.scheduler.release(source)
    assert world.scheduler.next_forks() == []
    assert world.prefill() == [fork]


def test_a_batch_that_failed_comes_back_in_order_one_by_one() -> None:
    world = World(4, budget=100)
    sequences = [world.submit(5) for _ in range(3)]
    world.scheduler.retry_alone(world.prefill())
    world.check()
    for sequence in sequences:
        assert world.prefill() == [sequence]
        world.finish([sequence])
    world.check()


def test_waiting_sequences_leave_the_queue() -> None:
    world = World(1, budget=100)
    first, second = world.submit(5), world.submit(5)
    world.scheduler.release(first)
    assert list(world.scheduler.waiting) == [second]


@pytest.mark.parametrize("seed", range(20))
def test_slots_stay_in_order_through_any_history(seed: int) -> None:
    draw = random.Random(seed)
    world = World(draw.randint(1, 5), budget=40)
    alive: list[Sequence] = []
    for _ in range(300):
        action = draw.random()
        if action < 0.3:
            alive.append(world.submit(draw.choice((3, 10, 25, 90))))
        elif action < 0.7:
            batch = world.prefill(lambda sequence: sequence.prompt.length != 25)
            if len(batch) == 1 and batch[0].computed + 40 < batch[0].prompt.length:
                batch[0].computed += 40
            elif len(batch) > 1 and draw.random() < 0.1:
                world.scheduler.retry_alone(batch)
            else:
                world.finish(batch)
        elif alive:
            sequence = alive.pop(draw.randrange(len(alive)))
            world.scheduler.release(sequence)
            assert sequence.slot == -1
        for sequence in world.scheduler.running:
            sequence.tokens.append(0)
        world.check()
