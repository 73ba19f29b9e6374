"""Admission to the queue, by invented rates and by answers whose steps last as long as a clock says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from steering import Busy, Completion, Engine, Request
from steering.core import steps
from steering.core.admission import Rate
from steering.core.budget import Allowance
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import greedy, run_down, user
from tests.steering.inside import sequences

SECONDS = 0.5
"""The duration of each step."""


def rate(tokens: int = 10, step: float = SECONDS, prefill: float = 2.0) -> Rate:
    found = Rate()
    found.step(prefill, 100)
    for _ in range(60):
        found.step(step, 0)
    for _ in range(8):
        found.ended(tokens)
    return found


def test_the_next_slot_by_hand() -> None:
    """Ten tokens an answer, half a second a step: of four answers one ends in 1.25 s, where they are spread evenly."""
    spread = [(0, 99), (3, 99), (5, 99), (8, 99)]
    until = rate().until_ended
    assert until(0, spread) == until(-3, spread) == 0
    assert until(1, spread) == pytest.approx(1 * 10 / 4 * SECONDS, rel=1e-4)
    assert until(3, spread) == pytest.approx(3 * 10 / 4 * SECONDS, rel=1e-4)
    assert until(4, spread) == pytest.approx(10 * SECONDS, rel=1e-4), "the youngest has all its tokens to come"
    assert until(9, spread) == pytest.approx(9 * 10 / 4 * SECONDS, rel=1e-4)


def test_answers_that_began_together_end_together() -> None:
    assert rate().until_ended(1, [(2, 99)] * 4) == pytest.approx(8 * SECONDS, rel=1e-4)
    assert rate().until_ended(5, [(2, 99)] * 4) == pytest.approx(18 * SECONDS, rel=1e-4), "the first of the next four"
    assert rate().until_ended(1, [(2, 7)] * 4) == pytest.approx(5 * SECONDS, rel=1e-4), "no answer may have more"
    assert rate().until_ended(1, [(50, 99)] * 4) == pytest.approx(10 / 4 * SECONDS, rel=1e-4), "longer than the mean"


def test_prompts_are_read_so_many_tokens_a_step() -> None:
    """100 tokens a step, and 3,000 values of pictures."""
    allowed, unknown = Allowance(3.0, 1024, each=0.03, picture_each=0.001), Allowance(3.0, 100, picture_each=math.inf)
    assert rate(prefill=2.0).until_read(250, [], allowed) == 2 * 2.0
    assert rate().until_read(99, [1499], allowed) == 0
    assert rate(prefill=2.0).until_read(99, [1000] * 9, allowed) == 3 * 2.0
    assert rate(prefill=2.0).until_read(99, [1000] * 9, Allowance(most=100)) == 0
    assert rate(prefill=2.0).until_read(99, [1000] * 3, unknown) == 3 * 2.0


def test_while_nothing_is_known_nobody_waits() -> None:
    assert Rate().until_ended(1, [(0, 9)]) == math.inf


@pytest.fixture
def clocked(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Return a maker of engines with two slots on which every step takes `SECONDS`."""
    clock = [0.0]
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])

    def make(**options: object) -> Engine:
        engine: Engine = make_engine("qwen2_vl", slots=2, **options)
        decode = engine.core.runner.decode

        def decoded(*given: object) -> object:
            clock[0] += SECONDS
            return decode(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.core.runner, "decode", decoded)
        return engine

    return make


def asked(engine: Engine, tokens: int, group: str = "") -> Completion:
    with engine.turn(group) as turn:
        return turn.submit(Request(user("How many?"), greedy(tokens)))


def test_whoever_would_wait_too_long_is_refused(clocked: Callable[..., Engine]) -> None:
    engine = clocked(max_wait=1.9)
    known = [asked(engine, 6) for _ in range(2)]
    with pytest.raises(Busy, match="would wait longer") as refused, engine.turn() as turn:
        turn.check()
    assert refused.value.retry_after == 60.0, "no answer has ended"
    for one in known:
        run_down(engine, one)
    running = [asked(engine, 6) for _ in range(2)]
    engine.step()
    assert [len(sequences(one)[0].tokens) for one in running] == [2, 2]
    with pytest.raises(Busy) as refused:  # both have four tokens, which is 2 s, to come
        asked(engine, 6)
    assert refused.value.retry_after == 1.0
    engine.step()
    taken, now = asked(engine, 6), steps.time.monotonic()  # 1.5 s
    with pytest.raises(Busy):  # 3 s, as another is before it
        asked(engine, 6)
    run_down(engine, taken)
    assert sequences(taken)[0].times.admitted - now == 1.5


def test_pictures_of_those_before_are_waited_for(
    clocked: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duration of pictures is unknown: each has a step, and all prompts have room beside them."""
    engine = clocked(max_wait=0.9)
    run_down(engine, asked(engine, 6))
    one = Allowance(9.0, 1024, picture_each=math.inf)
    monkeypatch.setattr(engine.core.admission, "_allowance", lambda: one)
    running = asked(engine, 6)
    engine.step()
    assert engine.core.admission.wait(1, "") == 0.0
    shown = engine.submit(Request(families.example_messages("qwen2_vl", 3), greedy(6)))
    with pytest.raises(Busy):
        asked(engine, 6)
    assert engine.core.admission.wait(0, "") == pytest.approx(3 * SECONDS), "a step for each of the pictures"
    for one in (running, shown):
        run_down(engine, one)


def test_a_group_waits_only_behind_those_before_its_turn(clocked: Callable[..., Engine]) -> None:
    engine = clocked(max_wait=4.0)
    run_down(engine, asked(engine, 6))
    first = [asked(engine, 6, "many") for _ in range(4)]
    engine.step()
    with pytest.raises(Busy):
        asked(engine, 6, "many")
    assert run_down(engine, asked(engine, 6, "few")).choices
    for one in first:
        run_down(engine, one)


def test_a_wait_is_a_number_of_seconds(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="max_wait must be 0 or more"):
        make_engine("qwen2_vl", max_wait=-1.0)
