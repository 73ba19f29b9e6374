"""States of slots against lists of tokens: a state is the sum of the tokens that it is behind."""

from __future__ import annotations

import random

import pytest
import torch

from steering.decoder.kv import KVPool
from steering.recurrent.states import LayerStates, RecurrentPass, RecurrentStates

SLOTS, LAYERS = 4, (0, 2)


def empty() -> LayerStates:
    return torch.empty(1, 2, 3), torch.empty(1, 2, 2, 2)


def run(
    states: RecurrentStates, slots: list[int], starts: list[int], tokens: list[list[int]], kept: bool
) -> list[float]:
    """Run a pass that adds each row's tokens to its states, padded to the longest; return what its rows read."""
    lengths = [len(row) for row in tokens]
    step = RecurrentPass(states, torch.tensor(slots), torch.tensor(starts), lengths, kept)
    seen: list[list[float]] = []
    for layer in LAYERS:
        pooled, read, write = step.places(layer, max(lengths), empty)
        inputs, matrix = (tensor[read] for tensor in pooled)
        seen.append([float(row.unique()) for row in matrix])
        assert [float(row.unique()) for row in inputs] == seen[-1]
        sums = torch.tensor([float(sum(row)) for row in tokens])
        if write is not None:
            pooled[0][write], pooled[1][write] = inputs + sums[:, None, None], matrix + sums[:, None, None, None]
    assert all(rows == seen[0] for rows in seen)
    return seen[0]


@pytest.mark.parametrize("seed", range(5))
def test_passes_that_go_on_are_repeated_tried_moved_and_dropped(seed: int) -> None:
    """Each slot goes on behind its tokens, or again behind those before its last pass, as after a failure."""
    drawn, states = random.Random(seed), RecurrentStates(SLOTS)
    held: list[list[int]] = [[] for _ in range(SLOTS)]  # the tokens of each slot
    before = [0] * SLOTS  # how many of them were there before its last pass
    snapshots = []
    for _ in range(300):
        kind = drawn.choice(["go on", "go on", "go on", "again", "fresh", "try", "move", "clear", "take", "put"])
        slots = drawn.sample(range(SLOTS), drawn.randint(1, SLOTS))
        slot, other = drawn.sample(range(SLOTS), 2)
        if kind in ("go on", "again", "fresh", "try"):
            starts = [{"again": before[at], "fresh": 0}.get(kind, len(held[at])) for at in slots]
            tokens = [[drawn.randint(1, 99) for _ in range(drawn.randint(1, 3))] for _ in slots]
            read = run(states, slots, starts, tokens, kept=kind != "try")
            assert read == [sum(held[at][:start]) for at, start in zip(slots, starts, strict=True)]
            if kind != "try":
                for at, start, new in zip(slots, starts, tokens, strict=True):
                    held[at], before[at] = held[at][:start] + new, start
        elif kind == "move":
            states.move(slot, other)
            held[other], before[other] = [*held[slot]], before[slot]
        elif kind == "clear":
            for pooled in states.tensors[:-1]:
                if held[slot]:
                    pooled[slot :: states.slots][:2] = torch.nan
            states.clear(slot)
            held[slot], before[slot] = [], 0
            assert not any(bool(pooled.isnan().any()) for pooled in states.tensors[:-1])
        elif kind == "take" and held[slot]:
            snapshots.append(([*held[slot]], states.taken(slot, len(held[slot]))))
        elif kind == "put" and snapshots:
            known, snapshot = drawn.choice(snapshots)
            states.put(slot, len(known), snapshot)
            held[slot], before[slot] = [*known], len(known)
    assert len(snapshots) > 5


def test_a_state_that_no_slot_has_is_read_as_zeros_and_not_written() -> None:
    """Rows that pad a captured decode stand at the last column, in slots that others use."""
    states = RecurrentStates(SLOTS)
    run(states, [0, 1], [0, 0], [[1], [2, 3]], kept=True)
    snapshot = states.taken(1, 2)
    run(states, [1], [2], [[4]], kept=True)
    states.put(1, 2, snapshot)
    assert run(states, [0, 1, 2], [9, 3, 9], [[5], [6], [7]], kept=True) == [0, 0, 0]
    assert run(states, [0, 1], [1, 2], [[1], [1]], kept=False) == [1, 5]
    assert run(states, [0, 1, 2], [10, 4, 10], [[1], [1], [1]], kept=False) == [0, 0, 0]


def test_bytes_are_those_of_two_states_a_slot() -> None:
    pool = KVPool(SLOTS, 8)
    pool.states.allot(RecurrentStates(1))
    assert (pool.bytes, bool(pool.states), pool.states.slot_bytes) == (0, False, {})
    run(pool.states, [0], [0], [[1]], kept=False)
    numbers = len(LAYERS) * (2 * 3 + 2 * 2 * 2)
    assert pool.states.slot_bytes == {torch.device("cpu"): 2 * 4 * numbers}
    assert pool.states.bytes == (2 * SLOTS + 2) * 4 * numbers + 2 * SLOTS * 8
