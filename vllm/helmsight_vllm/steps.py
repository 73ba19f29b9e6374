"""The tokens of an answer in a step, and what is done to and read of them."""

from __future__ import annotations

from typing import NamedTuple

from helmsight_vllm.answer import Answer
from helmsight_vllm.plan import Ints, Plan

NOTHING = range(0)


class Step(NamedTuple):
    """The tokens of an answer in a step.

    place: the answer's in the batch. first: the first token's row in the step. start, stop: their positions. rows: of the
    table, None without steering. inverse, states, think: the positions that are measured so. looked: the ranges of positions
    whose attention is read, None where none is asked for. patches: the pictures' patches among them. due: a mask is.
    """

    answer: Answer
    place: int
    first: int
    start: int
    stop: int
    rows: Ints | None
    inverse: range
    states: range
    think: range
    looked: list[tuple[int, int]] | None
    patches: Ints
    due: bool


def step_of(answer: Answer, place: int, first: int, start: int, stop: int) -> Step:
    """Return the step of an answer whose tokens are at positions start to stop; none of them is measured twice."""
    plan, new = answer.plan, max(start, answer.counted)
    reads_states = plan.residual or plan.state_position is not None
    return Step(
        answer,
        place,
        first,
        start,
        stop,
        answer.rows_at(start, stop) if answer.steers else None,
        NOTHING if plan.steered is None else range(new, min(stop, plan.length)),
        range(max(new, _first_state(plan)), stop) if reads_states else NOTHING,
        NOTHING if plan.think is None else range(start, stop),  # a damped update is damped whenever it is computed
        None if plan.attention is None else answer.looks_at(new, stop),
        answer.patches_at(start, stop),
        answer.is_due(stop),
    )


def _first_state(plan: Plan) -> int:
    """Return the first position whose states are read."""
    last = plan.length - 1
    return last if plan.state_position is None else min(last, plan.length + plan.state_position)
