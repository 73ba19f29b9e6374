"""Requests that arrive while a step reads prompts are read in the same step, if it has room."""

from __future__ import annotations

import pytest

from steering import Completion, Engine, Request, Sampling
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.inside import sequences

FAMILY = "qwen2_vl"


def request(images: int = 0, text: str = "What?") -> Request:
    chat = families.example_messages(FAMILY, images, text=text) if images else [{"role": "user", "content": text}]
    return Request(chat, Sampling(max_tokens=4, ignore_eos=True))


def begun(engine: Engine, others: list[Request], tells: bool = True) -> tuple[list[int], list[Completion]]:
    """Return the number of tokens of each answer behind one step.

    The others arrive one by one, once first tokens are there.
    """
    completions = [engine.submit(request())]

    def said() -> bool:
        assert len(sequences(completions[-1])[0].tokens) == 1, "called where first tokens are there"
        if others:
            completions.append(engine.submit(others.pop(0)))
            return tells
        return False

    engine.core.steps.meanwhile = said
    engine.step()
    return [len(sequences(one)[0].tokens) for one in completions], completions


def test_others_begin_in_the_step_that_they_come_in(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=4)
    counts, completions = begun(engine, [request(), request(1), request(text="Why?")])
    assert counts == [2] * 4, "the first token, and that of the one decode"
    assert engine.stats()["steps"] == 1
    plain = make_engine(FAMILY, slots=4)
    asked = [request(), request(), request(1), request(text="Why?")]
    for completion, one in zip(completions, asked, strict=True):
        found = engine.result_of(completion)
        assert found.choices[0].token_ids == plain.generate([one])[0].choices[0].token_ids


@pytest.mark.parametrize(("slots", "budget", "tells"), [(4, 1024, False), (4, 40, True), (1, 1024, True)])
def test_they_wait_for_the_next_one_where_there_is_no_room(
    make_engine: MakeEngine, slots: int, budget: int, tells: bool
) -> None:
    engine = make_engine(FAMILY, slots=slots, prefill_budget=budget)
    counts, completions = begun(engine, [request()], tells)
    assert counts == [2, 0]
    assert len(engine.result_of(completions[1]).choices[0].token_ids) == 4
