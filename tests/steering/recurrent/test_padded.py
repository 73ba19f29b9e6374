"""Prompts of a model with recurrent states run in graphs that pad them, with the states that eager passes leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steering import Request
from steering.accel import prompt_graphs, prompt_step
from steering.accel.prompt_graphs import PromptGraphs, _Kind
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from steering.recurrent.padded import PaddedPass, divided_at
from steering.recurrent.slots import InSlots
from steering.recurrent.states import GRAIN, RecurrentStates
from tests.steering.accel.test_prompt_graphs import beside_each_other
from tests.steering.conftest import MakeEngine
from tests.steering.cpu.conftest import check_alike
from tests.steering.parallel.asking import chat
from tests.steering.recurrent.modules import SHAPES, a_module
from tests.steering.recurrent.test_cached import FIRST, ROOM, SAMPLING, SECOND, asking, of_length
from tests.steering.recurrent.test_delta import WITHIN, drawn, in_slots, plainly
from tests.steering.triton.reference import pooled

TOKENS, SLOT = 192, 2


@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 64), (0, 65), (0, 192), (64, 100), (70, 58), (70, 59), (100, 3)]
)
def test_a_padded_pass_leaves_what_token_by_token_leaves(start: int, length: int) -> None:
    module = a_module(SHAPES[0])
    forward, pool = in_slots(module), KVPool(4, 512)
    prompt, other = drawn(start + length, 2)
    if start:
        forward(prompt[None, :start], Prefill(pool, slice(SLOT, SLOT + 1), lengths=[start]))
    else:
        forward(other[None], Prefill(pool, slice(0, 1), lengths=[2]))  # makes the states of all slots
    padding = torch.full((TOKENS - length, prompt.shape[1]), 9.0)
    whole, inputs, matrix = plainly(module, prompt)
    numbers = (torch.tensor([number]) for number in (SLOT, start))
    for _ in range(2):  # a pass that is run again gives the same
        step = PaddedPass(pool.states, *numbers, real=(), tokens=TOKENS, length=torch.tensor([length]))
        numbers = step.slots, step.starts
        output = forward(torch.cat([prompt[start:], padding])[None], SimpleNamespace(recurrent=step))
        torch.testing.assert_close(output[0, :length], whole[start:], **WITHIN)
        taken = pool.states.taken(SLOT, start + length)[0]
        torch.testing.assert_close(taken[1], matrix, **WITHIN)
        torch.testing.assert_close(taken[0], inputs, **WITHIN)
        divided = divided_at(start, length)
        assert (start + divided) % GRAIN == 0 or divided == 0
        if divided:
            _, inputs_there, matrix_there = plainly(module, prompt[: start + divided])
            left = pool.states.left()[0]
            torch.testing.assert_close(left[1], matrix_there, **WITHIN)
            torch.testing.assert_close(left[0], inputs_there, **WITHIN)


@pytest.fixture(params=["qwen3_5", "lfm2_vl"])
def beside(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Any, Any, PromptGraphs]:
    """Return an eager engine, one with graphs, and these."""
    monkeypatch.setattr(prompt_step, "pooled", pooled)
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 0)
    return beside_each_other(make_engine, request.param, max_length=512, prefix_cache_bytes=ROOM)


def compare(plain: Any, ours: Any, *requests: Request) -> list[int]:
    """Compare answers; return how many tokens of each prompt came from the cache."""
    expected, got = (engine.generate(list(requests)) for engine in (plain, ours))
    check_alike(expected, got)
    assert [one.cached_tokens for one in got] == [one.cached_tokens for one in expected]
    return [one.cached_tokens for one in got]


def test_prompts_go_on_from_states_that_graphs_left(beside: tuple[Any, Any, PromptGraphs]) -> None:
    plain, ours, graphs = beside
    exactly = Request(of_length(plain, 2 * GRAIN), SAMPLING)
    for _ in range(2):
        # Each prompt twice: a graph's first results are the eager pass's, with its states.
        hits = [compare(plain, ours, request)[0] for request in (asking(FIRST), asking(SECOND), exactly)]
    assert min(hits) >= GRAIN
    assert hits[2] == GRAIN
    assert len([form for form in graphs._forms if form.agreed]) >= 2
    before = graphs.taken
    assert compare(plain, ours, asking(FIRST + "Or not?"))[0] >= GRAIN
    assert graphs.taken > before


def test_several_prompts_run_one_after_the_other_once_there_are_graphs(beside: tuple[Any, Any, PromptGraphs]) -> None:
    plain, ours, graphs = beside
    asked = [Request(chat(text=f"{number}, is it? " * 3), SAMPLING) for number in range(7)]
    compare(plain, ours, *asked[:3])
    assert graphs.taken == 0
    compare(plain, ours, asked[3])
    assert graphs.taken == 1
    compare(plain, ours, *asked[4:])
    assert graphs.taken == 4


@pytest.mark.parametrize("wrong", ["left", "written"])
def test_a_graph_that_leaves_wrong_states_is_not_used(
    wrong: str, beside: tuple[Any, Any, PromptGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own output is right: only tokens that follow would be wrong."""
    plain, ours, graphs = beside
    if wrong == "left":
        leave = RecurrentStates.leave
        monkeypatch.setattr(
            RecurrentStates, "leave", lambda states, layer, new: leave(states, layer, [-tensor for tensor in new])
        )
    else:
        last = InSlots._last
        monkeypatch.setattr(
            InSlots,
            "_last",
            lambda module, states, inputs: last(module, states, inputs) * (1 if states.real else -1),
        )
    compare(plain, ours, Request(chat(text="Is it?"), SAMPLING))
    for _ in range(4):  # the second goes on from the cache, and has another length
        compare(plain, ours, asking(FIRST))
    wrong_forms = [form for form in graphs._forms if form.refused]
    assert {form.tokens for form in wrong_forms} >= {320}
    assert all({kind.wants for kind in form.agreed} == {False} for form in graphs._forms if not form.refused)
    assert graphs.taken > 1


def test_a_graph_that_reads_wrong_states_is_not_used(
    beside: tuple[Any, Any, PromptGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was right for a whole prompt is compared again where it first goes on behind other tokens."""
    plain, ours, graphs = beside
    places = PaddedPass.places

    def nothing_before(states: PaddedPass, *args: Any) -> Any:
        pooled, read, write = places(states, *args)
        return pooled, torch.full_like(read, 2 * states.states.slots), write

    monkeypatch.setattr(PaddedPass, "places", nothing_before)
    short, long = (Request(of_length(plain, tokens), SAMPLING) for tokens in (60, 2 * GRAIN + 60))
    for request in (short, short, long):
        compare(plain, ours, request)
    assert [form.tokens for form in graphs._forms if form.graph] == [64, 192]
    assert compare(plain, ours, long) == [2 * GRAIN]
    assert [form.tokens for form in graphs._forms if form.refused] == [64]


def test_only_states_before_the_end_of_a_chunk_are_left_in_a_place_of_their_own() -> None:
    """A graph that was compared where others are wanted has not shown that it leaves these."""
    some: list[list[int]] = [[], [2 * GRAIN], [GRAIN, 2 * GRAIN]]
    chunks: list[Any] = [
        SimpleNamespace(sequences=[None], starts=[0], lengths=[2 * GRAIN], wanted=[wanted]) for wanted in some
    ]
    assert [_Kind.of(chunk).wants for chunk in chunks] == [False, False, True]
