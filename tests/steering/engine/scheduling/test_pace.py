"""How long steps get beside running answers, by times that are made up and by prompts that come in."""

from __future__ import annotations

import time
from typing import Any

import pytest

from steering import Engine, Fault, Request
from steering.engine import steps
from steering.engine.pace import CROWDED, LEAST, UNKNOWN, Pace, Room
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.engine.asking import greedy, run_down, user


def steered(pace: Pace, decode: float, fixed: float, token: float, steps: int = 30) -> Pace:
    """The pace after so many steps of a machine on which a decode takes so many seconds, and reading a prompt so many more,
    whatever its length, and for each token."""
    for _ in range(80):
        pace.step(0.0, decode, 0, running=True)
    for _ in range(steps):
        n = pace.room(1).tokens
        pace.step(fixed + n * token, decode, n, running=True)
    return pace


@pytest.mark.parametrize(
    ("fixed", "token", "stall", "fit"),
    [
        (0.010, 0.0001, 3.0, 100),
        (0.010, 0.0001, 5.0, 300),
        (0.017, 0.0001, 3.0, 30),  # a pass takes more than a decode
        (0.000, 0.0001, 3.0, 200),
        (0.010, 0.000001, 3.0, 1024),
        (0.010, 0.1, 3.0, LEAST),
        (0.030, 0.0001, 3.0, LEAST),  # longer than it may be, whatever is taken
    ],
)
def test_a_step_is_as_long_as_it_may_be(fixed: float, token: float, stall: float, fit: int) -> None:
    """(decode + fixed + n * token) / decode = stall"""
    pace = steered(Pace(stall, most=1024), 0.010, fixed, token)
    assert pace.room(1).tokens == pytest.approx(fit, abs=1 + fit * 0.02 + 0.0005 / token)
    assert pace.room(0).tokens == 1024


def test_what_a_prompt_takes_alone_is_a_beginning() -> None:
    pace = Pace(3.0, 1024)
    pace.step(0.0, 0.010, 0, running=True)
    pace.step(0.100, 0.0, 500, running=False)
    assert pace.room(1).tokens == 50


def test_a_short_prompt_tells_that_more_fits_and_never_that_less_does() -> None:
    pace = steered(Pace(3.0, 1024), 0.010, 0.010, 0.0001)
    pace.step(0.011, 0.010, 10, True)
    assert pace.room(1).tokens == pytest.approx(100, abs=8)
    for _ in range(20):  # many of a length, in a pass that takes little
        pace.step(0.002, 0.010, min(60, pace.room(1).tokens), True)
    assert pace.room(1).tokens > 200


def test_several_whole_prompts_may_take_longer_together() -> None:
    """(.01 + .012 + n * .0001) / .01 is 3 where n is 80, and 4.5 where it is 230."""
    pace = steered(Pace(3.0, 1024), 0.010, 0.012, 0.0001)
    for _ in range(30):
        n = pace.room(1).together
        assert n is not None
        pace.step(0.012 + n * 0.0001, 0.010, n, True, prompts=4)
    assert pace.room(1).tokens == pytest.approx(80, abs=9)
    assert pace.room(1).together == pytest.approx(230, abs=15)


def test_as_many_pictures_are_encoded_as_a_step_has_room_for() -> None:
    """(4.5 - 2) * .01 / .003"""
    pace = steered(Pace(3.0, 1024), 0.010, 0.010, 0.0001)
    assert pace.room(0).pictures is None
    assert pace.room(1).pictures == 1
    pace.encoded(0.012, 4)
    assert pace.room(1).pictures in (7, 8)  # the median decode is within 2 %
    for _ in range(40):
        pace.encoded(0.2, 1)
    assert pace.room(1).pictures == 1


def test_the_decode_is_that_of_steps_that_read_prompts_too() -> None:
    """Where each step reads some, none only decodes: with more rows it takes longer."""
    pace = steered(Pace(3.0, 1024), 0.010, 0.010, 0.0001)
    for _ in range(80):
        n = pace.room(1).tokens
        pace.step(0.010 + n * 0.0001, 0.030, n, True)
    assert pace.room(1).tokens == pytest.approx(500, abs=25)


def test_it_follows_the_machine_and_forgives_a_pause() -> None:
    pace = steered(Pace(3.0, most=1024), 0.010, 0.010, 0.0001)
    steered(pace, 0.020, 0.020, 0.0001, steps=40)
    assert pace.room(1).tokens == pytest.approx(200, abs=5)
    pace.step(0.0, 60.0, 0, running=True)
    assert pace.room(1).tokens < 400
    pace.step(60.0, 0.020, 200, running=True)
    assert pace.room(1).tokens >= 140
    before = pace.room(1).tokens
    pace.step(0.021, 0.020, 10, running=True)  # a short prompt that fits
    assert pace.room(1).tokens == before


def test_a_longer_prompt_takes_fewer_tokens_a_step() -> None:
    """Tokens take longer the more stand before them: steps are as long at its end as at its beginning."""
    pace, taken, times = steered(Pace(3.0, 1024), 0.010, 0.010, 0.0001), 0, []
    while taken < 4000:
        n = pace.room(1).tokens
        taking = 0.010 + n * 0.0001 * (1 + taken / 1000)
        times.append(0.010 + taking)
        pace.step(taking, 0.010, n, running=True)
        taken += n
    assert max(times) < 0.034
    assert min(times) > 0.026
    assert pace.room(1).tokens < 35


def test_before_anything_is_known_a_step_takes_little() -> None:
    assert Pace(3.0, 1024).room(1).tokens == UNKNOWN
    assert Pace(3.0, 16).room(1).tokens == 16
    assert Pace(3.0, 1024).room(0).tokens == 1024
    with pytest.raises(ValueError, match="max_stall must be above 2"):
        Pace(2.0, 1024)


def test_where_many_wait_more_come_in() -> None:
    pace = Pace(4.0, 1024)
    pace.encoded(0.010, 1)
    for _ in range(400):
        pace.step(pace.room(1).together * 0.0005, 0.020, pace.room(1).together or 0, True, prompts=2)
    few = pace.room(8, 1)
    assert few == pace.room(8) == pace.room(64, 3)
    for running, waiting, times in ((1, 9, 9), (2, 20, 10), (2, 3, CROWDED), (16, 5, CROWDED), (64, 11, 3.75)):
        many = pace.room(running, waiting)
        assert many.tokens == pytest.approx(times * few.tokens, abs=3)
        assert many.together == pytest.approx(min(1024, times * (few.together or 0)), abs=3)
        assert many.pictures == pytest.approx(times * (few.pictures or 0), abs=times)
    assert pace.room(1, 1000).tokens == 1024
    assert pace.room(1, 1000).together == 1024


def test_what_a_step_for_a_crowd_takes_says_what_one_for_few_may_take() -> None:
    """Where a token takes .1 ms and a pass nothing beside, all steps say the same."""
    few, crowd = steered(Pace(3.0, 4096), 0.010, 0.0, 0.0001), Pace(3.0, 4096)
    crowd.step(0.0, 0.010, 0, running=True)
    for _ in range(40):
        room = crowd.room(1, 4)
        crowd.step(room.tokens * 0.0001, 0.010, room.tokens, running=True, crowd=room.crowd)
    assert crowd.room(1, 4).tokens == pytest.approx(CROWDED * few.room(1).tokens, rel=0.02)
    assert crowd.room(1).tokens == pytest.approx(few.room(1).tokens, rel=0.02)


def test_steps_without_a_decode_are_not_taken_for_short_ones(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first step of a server nobody has decoded anything."""
    engine: Engine = make_engine("qwen2_vl", slots=2, max_length=512)
    told: list[tuple[float, int, bool]] = []
    step = Pace.step

    class Noted(Pace):
        def step(self, seconds: float, decode: float, tokens: int, running: bool, *more: Any) -> None:
            told.append((decode, tokens, running))
            step(self, seconds, decode, tokens, running, *more)

    decode = engine._steps.runner.decode

    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        return decode(*given)

    monkeypatch.setattr(engine._steps.runner, "decode", slow)
    monkeypatch.setattr(engine._steps, "pace", pace := Noted(6.0, 16))
    engine.generate([Request(families.example_messages("qwen2_vl", 2), greedy(4))])
    alone = [decode for decode, tokens, running in told if tokens and not running]
    assert len(alone) > 1
    assert alone[0] == 0.0
    assert all(decode == 0.0 or decode > 0.02 for decode, *_ in told)
    assert pace._decode > 0.02


def test_pictures_are_encoded_one_a_step_beside_a_running_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=512, image_cache_bytes=0)
    calls: list[int] = []
    encode = engine.mllm.image_features

    def encoded(tensors: Any) -> Any:
        calls.append(len(tensors["image_grid_thw"]))
        return encode(tensors)

    monkeypatch.setattr(engine.mllm, "image_features", encoded)
    chats = [families.example_messages("qwen2_vl", 3, seed=seed) for seed in range(2)]
    alone = [engine.generate([Request(chat, greedy())])[0].choices[0] for chat in chats]
    assert calls == [3, 3]
    calls.clear()
    running = engine.submit(Request(user("How many?"), greedy(40)))
    engine.step()
    monkeypatch.setattr(engine._steps, "next_room", lambda: Room(1024, 1 if engine._scheduler.running else None))
    asked = [engine.submit(Request(chat, greedy())) for chat in chats]
    for step in range(1, 4):
        engine.step()
        assert calls == [1] * step
        assert bool(asked[0].sequences[0].computed) == (step == 3), "the last one is embedded with its prompt"
    for completion, plain in zip(asked, alone, strict=True):
        found = engine.result_of(completion).choices[0]
        assert found.token_ids == plain.token_ids
    assert calls == [1] * 6
    run_down(engine, running)
    broken = engine.submit(Request(user("How many?"), greedy(40)))
    engine.step()
    monkeypatch.setattr(engine.mllm, "image_features", lambda tensors: 1 / 0)
    failing = engine.submit(Request(chats[0], greedy()))
    with pytest.raises(Fault):
        engine.result_of(failing)
    run_down(engine, broken)


def test_prompts_come_in_by_the_pace_beside_a_running_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that takes a second for every pass and .05 for every token: (1 + 1 + 40 * .05) is four times one."""
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=1024)
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
    long = engine.submit(Request(user("one two three " * 150), greedy(2)))
    while not long.sequences[0].tokens:
        engine.step()
    assert chunks[0] <= UNKNOWN
    assert len(chunks) > 8
    assert chunks[7:-1] == pytest.approx([40] * len(chunks[7:-1]), abs=4)
    assert sum(chunks) == long.prompt_tokens
    run_down(engine, running)
