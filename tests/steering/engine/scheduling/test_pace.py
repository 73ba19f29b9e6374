"""How long steps get beside running answers, by times that are made up and by prompts that come in."""

from __future__ import annotations

import pytest

from steering import Engine, Request
from steering.engine import steps
from steering.engine.pace import LEAST, UNKNOWN, Pace
from tests.steering.conftest import MakeEngine
from tests.steering.engine.asking import greedy, run_down, user


def learned(decode: float, token: float, stall: float = 3.0) -> Pace:
    """The pace of a machine on which a pass takes so many seconds, and a prompt's token so many more."""
    pace = Pace(stall, most=1024)
    for _ in range(3):
        pace.step(decode, 0, running=True)
        pace.step(decode + 200 * token, 200, running=False)
        pace.step(2 * decode + 100 * token, 100, running=True)
    return pace


def test_a_step_is_as_long_as_it_may_be() -> None:
    """(decode + decode + n * token) / decode <= stall"""
    assert learned(0.010, 0.0001).budget(running=True) in (99, 100)
    assert learned(0.010, 0.0001, stall=5.0).budget(running=True) in (299, 300)
    assert learned(0.010, 0.0001).budget(running=False) == 1024
    assert learned(0.010, 0.000001).budget(running=True) == 1024
    assert learned(0.010, 0.1).budget(running=True) == LEAST


def test_it_follows_the_machine_and_forgives_a_pause() -> None:
    pace = learned(0.010, 0.0001)
    for _ in range(30):
        pace.step(0.020, 0, running=True)
    assert pace.budget(running=True) == pytest.approx(200, abs=2)
    pace.step(60.0, 0, running=True)
    assert pace.budget(running=True) < 400
    pace.step(0.5, LEAST - 1, running=True)  # too few to tell what a token takes
    assert pace.budget(running=True) < 400


def test_before_anything_is_known_a_step_takes_little() -> None:
    assert Pace(3.0, 1024).budget(running=True) == UNKNOWN
    assert Pace(3.0, 64).budget(running=True) == 64
    assert Pace(3.0, 1024).budget(running=False) == 1024
    with pytest.raises(ValueError, match="max_stall must be above 2"):
        Pace(2.0, 1024)


def test_prompts_come_in_by_the_pace_beside_a_running_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that takes a second for every pass and .05 for every token: (1 + 1 + 40 * .05) is four times one."""
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=512)
    engine._steps.pace = Pace(4.0, most=1024)
    chunks: list[int] = []
    prefill, decode = engine._runner.prefill, engine._runner.decode
    clock = [0.0]

    def taken(batch: list, budget: int) -> object:  # type: ignore[type-arg]
        before = sum(one.computed for one in batch)
        logits = prefill(batch, budget)
        chunks.append(sum(one.computed for one in batch) - before)
        clock[0] += 1.0 + 0.05 * chunks[-1]
        return logits

    def decoded(*given: object) -> object:
        clock[0] += 1.0
        return decode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner, "prefill", taken)
    monkeypatch.setattr(engine._runner, "decode", decoded)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    running = engine.submit(Request(user("How many?"), greedy(40)))
    for _ in range(3):
        engine.step()
    chunks.clear()
    long = engine.submit(Request(user("one two three " * 80), greedy(2)))
    while not long.sequences[0].tokens:
        engine.step()
    assert chunks[0] <= UNKNOWN
    assert set(chunks[1:-1]) <= {39, 40}  # a quotient that is rounded
    assert len(chunks) > 3
    assert sum(chunks) == long.prompt_tokens
    run_down(engine, running)
