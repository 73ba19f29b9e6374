"""Prompts admitted to steps beside running answers, with invented times and with arriving prompts."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from steering import Engine, Fault, Request
from steering.core import steps
from steering.core.budget import FIRST, LEAST, Allowance, StepBudget, StepTotals
from steering.core.price import Price
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import greedy, run_down, user
from tests.steering.inside import sequences

H100, FUSED, CPU = (0.030, 0.00002, 0.009), (0.012, 0.00002, 0.006), (0.0, 0.0004, 0.009)
"""Seconds of a pass, of each of its tokens, and of a decode: of a 7B, of one with better kernels, of a small model."""


def steered(budget: StepBudget, fixed: float, token: float, decode: float, rows: int = 8) -> StepBudget:
    """Return the budget after steps of a machine with these prices, with prompts of all sizes."""
    for _ in range(40):
        budget.decode.learn(rows, decode)
    for size in (40, 40, 300, 1024, 200, 700) * 6:
        budget.prompt.learn(size, fixed + size * token)
    return budget


@pytest.mark.parametrize(
    ("prices", "gap", "stall", "fit"),
    [
        (H100, 0.100, None, 3050),  # (100 - 9 - 30) / .02
        (H100, 0.070, None, 1550),
        (H100, 0.050, None, 1500),  # two passes do not fit: a pass of as many tokens as cost a pass
        (H100, 0.100, 3.0, 1500),  # three decodes are 27 ms
        (FUSED, 0.040, None, 1100),
        (FUSED, 0.100, 5.0, 600),  # 30 ms, which is the smaller bound
        (FUSED, 0.029, 5.0, 600),  # so many cost a pass; 550 fit
        (CPU, 0.100, None, 227),
        (CPU, 0.100, 3.0, 45),
        (CPU, 0.010, None, 22),  # prompts may take as long as the decode
        (H100, 0.010, None, 1500),
        ((0.0, 0.001, 0.009), 0.010, None, LEAST),
    ],
)
def test_a_step_is_as_long_as_it_may_be_and_pays_for_its_pass(
    prices: tuple[float, float, float], gap: float, stall: float | None, fit: int
) -> None:
    budget = steered(StepBudget(1024, gap, stall), *prices)
    assert budget.allowance(8).tokens() == pytest.approx(fit, rel=0.01, abs=1)


def test_nobody_is_held_up_where_nobody_runs() -> None:
    assert steered(StepBudget(1024, 0.1), *CPU).allowance(0).tokens() == 1024
    assert steered(StepBudget(1024, 0.1), *H100).allowance(0).tokens() == 4 * 1024, "passes are spared"
    assert steered(StepBudget(1024, 0.1), 0.006, 0.00003, 0.009).allowance(0).tokens() == pytest.approx(8 * 200, abs=1)
    assert steered(StepBudget(1024), *H100).allowance(0) == StepBudget(1024).allowance(0), "chunks do not hang on times"


def test_the_first_steps_measure_two_sizes() -> None:
    budget = StepBudget(1024, 0.1)
    sizes = []
    for _ in range(5):
        size = budget.allowance(8).tokens()
        sizes.append(size)
        budget.prompt.learn(size, 0.030 + 0.00002 * size)
        budget.decode.learn(8, 0.009)
    assert sizes[:3] == [FIRST, 4 * FIRST, 2 * FIRST]
    assert sizes[-1] == pytest.approx(3050, rel=0.02)
    assert StepBudget(16, 0.1).allowance(8).tokens() == 16
    long = StepBudget(1024, 0.1)
    for _ in range(3):
        long.prompt.learn(1000, 0.500)
    assert long.allowance(8).tokens() == 200, "1,000 tokens took half a second"
    assert long.allowance(8).part(1000) == 200


def test_what_is_not_known_to_fit_is_not_tried_at_once() -> None:
    """Behind passes that tell that tokens cost next to nothing, one of four times as many follows."""
    budget = StepBudget(4096, 0.1)
    for size in (20, 20, 100, 100):
        budget.prompt.learn(size, 0.040)
    assert budget.allowance(8).tokens() == 400


def test_a_decode_of_more_rows_leaves_less() -> None:
    budget = steered(StepBudget(1024, 0.1), 0.0, 0.0004, 0.009)
    for rows in (8, 16, 32) * 20:
        budget.decode.learn(rows, 0.001 + 0.001 * rows)
    assert budget.allowance(9).seconds == pytest.approx(0.090)
    assert budget.allowance(39).seconds == pytest.approx(0.060)
    assert budget.allowance(79).seconds == pytest.approx(0.080), "prompts have as much of the time as answers"
    assert budget.allowance(9).tokens(rows=10) == pytest.approx(200, rel=0.01), (
        "ten prompts make the decode 10 ms longer"
    )


def test_a_bound_is_one() -> None:
    with pytest.raises(ValueError, match="max_stall must be above 2"):
        StepBudget(1024, 0.1, 2.0)
    with pytest.raises(ValueError, match="max_gap must be above 0"):
        StepBudget(1024, 0.0)


ALLOWED = Allowance(0.1, 4096, 1000, 0.010, 0.00002, 0.005, 1e-6, 0.001)
"""100 ms; a pass 10 ms and .02 a token, encoding 5 ms and 1 a thousand values, 1 ms a row."""


def test_a_prompt_runs_whole_or_in_equal_parts() -> None:
    """4,950 tokens fit into 0.110 s, and 500 into 0.021; a pass of 1,000 pays."""
    wide, narrow = Allowance(0.110, 9000, 1000, 0.011, 0.00002), Allowance(0.021, 9000, 1000, 0.011, 0.00002)
    assert [wide.part(tokens) for tokens in (7, 4950, 4951, 9901)] == [7, 4950, 2476, 3301]
    assert wide._replace(most=400).part(500) == 250
    assert [narrow.part(tokens) for tokens in (7, 1500, 1999, 2000, 3500)] == [7, 1500, 1999, 1000, 1167]
    assert narrow._replace(most=600, least=600).part(1000) == 500
    assert Allowance(most=20).part(41) == 14


def test_pictures_and_prompts_share_a_step() -> None:
    """Each 6 ms of a picture, 4 of 200 tokens, 1 of its row; 15 ms beside."""
    assert ALLOWED.plan([(200, 6000)] * 7) == (7, True)
    assert ALLOWED.plan([(200, 0)] * 40) == (18, True)
    assert ALLOWED.plan([(200, 0)] * 3 + [(400, 0)] * 40) == (10, True), "padding counts"
    assert ALLOWED.plan([(9000, 0), (10, 0)]) == (1, True)
    assert ALLOWED.plan([(200, 90_000)]) == (1, False), "they are encoded in a step before"
    assert ALLOWED.plan([(200, 99_000)]) == (0, False), "they do not fit into any step"
    assert ALLOWED.plan([(200, 0), (200, 90_000), (200, 0)]) == (1, True)
    assert ALLOWED.plan([]) == (0, False)
    assert ALLOWED.values() == pytest.approx(95_000)
    assert Allowance(0.01, 4096, picture_fixed=0.03, picture_each=1e-6).values() == 30_000
    assert Allowance(0.1, 4096, picture_each=math.inf).plan([(200, 10)]) == (0, False), "one picture measures"
    assert Allowance(0.1, 4096, picture_each=math.inf).values() == 0
    assert Allowance(most=4096).plan([(200, 10**9)] * 20) == (20, True), "nobody is held up"


def test_pictures_are_encoded_first_where_that_takes_less_time() -> None:
    """The plan of an H100 with a limit of 91 ms.

    Pictures of 2 prompts and their pass take 76, 42 for each with a decode of 9, and of 3 89 and three rows; pictures of 6
    and then a pass of 6 take 127, 24 for each with two decodes.
    """
    h100 = Allowance(0.091, 4096, 1500, 0.030, 0.00002, 0.020, 0.00001, 0.001, 0.009)
    assert h100.plan([(440, 400)] * 6) == (6, False)
    assert h100.plan([(440, 0)] * 6) == (6, True), "then they run"
    assert h100.plan([(440, 400)] * 2) == (2, True)
    assert h100._replace(picture_fixed=0.0, fixed=0.0).plan([(440, 400)] * 6) == (6, True)
    slow = Allowance(0.091, 4096, 20, 0.001, 0.0001, 0.001, 0.00005, 0.0, 0.060)
    assert slow.plan([(100, 400)] * 3) == (2, True), "decodes are long, and passes cost little"


@pytest.mark.parametrize(("seconds", "prompts"), [(0.02, 4), (0.03, 3), (0.06, 1)])
def test_as_many_pictures_fit_as_if_each_cost_what_one_does(seconds: float, prompts: int) -> None:
    """All pictures so far were of one size. Beside a decode of 6 ms there are 94: for four, three or one."""
    budget = steered(StepBudget(1024, 0.1), *FUSED)
    for _ in range(10):
        budget.picture.learn(400, seconds)
    assert budget.allowance(8).plan([(1, 400)] * 5)[0] == prompts


def test_what_is_left_of_a_step() -> None:
    left = ALLOWED.after(StepTotals(1000, 2, 5000))
    assert left is not None
    assert left.seconds == pytest.approx(0.1 - 0.030 - 0.010 - 0.002)
    assert left.most == 3096
    assert ALLOWED.after(StepTotals(3200, 2)) is None, "a pass of 1,000 tokens takes 30 ms"
    assert ALLOWED._replace(most=1010).after(StepTotals(1000, 2)) is None


def test_a_prompt_waits_for_others_where_passes_are_expensive() -> None:
    budget = steered(StepBudget(1024, 0.1), *H100)
    assert budget.holds_back(64, 1, 440, now=100.0)
    assert budget.holds_back(64, 3, 1320, now=100.021)
    assert not budget.holds_back(64, 4, 1760, now=100.022), "together they pay for their pass"
    assert budget.gathered == pytest.approx(1.6)
    assert budget.holds_back(64, 1, 440, now=100.1)
    assert not budget.holds_back(64, 1, 440, now=100.131), "it has waited for as long as a pass takes"
    assert not budget.holds_back(15, 2, 900, now=100.2), "few are spared a pass"
    assert not budget.holds_back(64, 0, 0, now=100.2)
    slow = steered(StepBudget(1024, 0.1), 0.030, 0.00002, 0.025)
    assert not slow.holds_back(64, 1, 440, now=100.0), "a decode takes nearly as long as a pass"
    assert not StepBudget(1024, 0.1).holds_back(64, 1, 440, now=100.2), "nobody knows what a pass costs"


def test_nobody_waits_for_others_who_do_not_come() -> None:
    budget = steered(StepBudget(1024, 0.1), *H100)
    waits = 0
    for now in range(200):
        held = budget.holds_back(64, 1, 440, now)
        waits += held
        assert not (held and budget.holds_back(64, 1, 440, now + 0.1))
    assert waits <= 3 + 200 / 32


def test_its_figures_are_shown() -> None:
    shown = steered(StepBudget(1024, 0.05), *H100).stats(8)
    assert shown["pass_seconds"] == pytest.approx(0.030)
    assert shown["prompt_token_seconds"] == pytest.approx(0.00002)
    assert shown["decode_seconds"] == pytest.approx(0.009)
    assert shown["prompt_chunk_tokens"] == 1500
    assert shown["gap_unreachable"] == 1, "69 ms are more than 50"
    assert steered(StepBudget(1024, 0.07), *H100).stats(8)["gap_unreachable"] == 0


def test_steps_without_a_decode_are_not_taken_for_short_ones(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a server's first step nothing has been decoded yet."""
    engine: Engine = make_engine("qwen2_vl", slots=2, max_length=512)
    told: list[float] = []
    decode = engine.core.steps.runner.decode

    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        return decode(*given)

    monkeypatch.setattr(engine.core.steps.runner, "decode", slow)
    monkeypatch.setattr(engine.core.steps, "budget", budget := StepBudget(16, 0.1))
    monkeypatch.setattr(budget.decode, "learn", lambda rows, seconds: told.append(seconds))
    engine.generate([Request(families.example_messages("qwen2_vl", 2), greedy(4))])
    assert budget.prompt.count > 1
    assert len(told) == 3
    assert all(seconds > 0.02 for seconds in told)


def encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of pictures that are encoded together from now on."""
    calls: list[int] = []
    encode = engine.mllm.image_features

    def noted(tensors: Any) -> Any:
        calls.append(len(tensors["image_grid_thw"]))
        return encode(tensors)

    monkeypatch.setattr(engine.mllm, "image_features", noted)
    return calls


def test_pictures_are_encoded_one_a_step_beside_a_running_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=512, image_cache_bytes=0)
    calls = encoded(engine, monkeypatch)
    chats = [families.example_messages("qwen2_vl", 3, seed=seed) for seed in range(2)]
    alone = [engine.generate([Request(chat, greedy())])[0].choices[0] for chat in chats]
    assert calls == [3, 3]
    calls.clear()
    running = engine.submit(Request(user("How many?"), greedy(40)))
    engine.step()
    one = Allowance(0.1, 1024, picture_each=math.inf)  # of pictures it is not known how long they take
    monkeypatch.setattr(
        engine.core.steps, "allowance", lambda: one if engine.core.scheduler.running else Allowance(most=1024)
    )
    asked = [engine.submit(Request(chat, greedy())) for chat in chats]
    for step in range(1, 4):
        engine.step()
        assert calls == [1] * step
        assert not sequences(asked[0])[0].computed
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


def test_as_many_pictures_are_encoded_as_fit(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=512, image_cache_bytes=0)
    chat = families.example_messages("qwen2_vl", 3, seed=0)
    (alone,) = engine.generate([Request(chat, greedy())])[0].choices
    calls = encoded(engine, monkeypatch)
    running = engine.submit(Request(user("How many?"), greedy(40)))
    engine.step()
    asked = engine.submit(Request(chat, greedy()))
    sizes = [picture.values for picture in sequences(asked)[0].prompt.pictures]
    two = Allowance(sum(sizes[:2]) * 1e-3, 1024, picture_each=1e-3)
    monkeypatch.setattr(engine.core.steps, "allowance", lambda: two)
    engine.step()
    assert calls == [2]
    engine.step()
    assert calls == [2, 1]
    assert sequences(asked)[0].computed
    assert engine.result_of(asked).choices[0].token_ids == alone.token_ids
    run_down(engine, running)


def test_prompts_come_in_by_their_price_beside_a_running_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes a second plus .01 for every token, with a limit of 5.25 s.

    (5.25 - 2) / .01 are 325 tokens, so that a prompt of up to 650 comes in two equal parts.
    """
    engine: Engine = make_engine("qwen2_vl", slots=3, max_length=1024)
    engine.core.steps.budget = StepBudget(1024, 5.25)
    chunks: list[int] = []
    prefill, decode = engine.core.runner.prefill, engine.core.runner.decode
    clock = [0.0]

    def taken(batch: list, budget: int) -> object:  # type: ignore[type-arg]
        before = sum(one.computed for one in batch)
        logits = prefill(batch, budget)
        chunks.append(sum(one.computed for one in batch) - before)
        clock[0] += 1.0 + 0.01 * chunks[-1]
        return logits

    def decoded(*given: object) -> object:
        clock[0] += 1.0
        return decode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.core.runner, "prefill", taken)
    monkeypatch.setattr(engine.core.runner, "decode", decoded)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    running = engine.submit(Request(user("How many?"), greedy(60)))
    for _ in range(3):
        engine.step()
    for seed in range(4):
        before = len(chunks)
        long = engine.submit(Request(user(f"{seed} " + "one two three " * 110), greedy(2)))
        while not sequences(long)[0].tokens:
            engine.step()
        assert sum(chunks[before:]) == long.prompt_tokens
    assert len(chunks[before:]) == 2
    assert chunks[-1] == pytest.approx(chunks[-2], abs=1)
    assert engine.stats()["pass_seconds"] == pytest.approx(1.0)
    assert engine.stats()["prompt_token_seconds"] == pytest.approx(0.01)
    run_down(engine, running)


def test_prompts_that_come_one_by_one_share_a_pass(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 10 s, a decode one, and every two seconds somebody asks: they wait for one another for up to 10 s."""
    engine: Engine = make_engine("qwen2_vl", slots=30, max_length=512)
    engine.core.steps.budget = budget = StepBudget(1024, 60.0)
    clock, batches = [0.0], list[int]()
    prefill, decode = engine.core.runner.prefill, engine.core.runner.decode

    def taken(batch: list, tokens: int) -> object:  # type: ignore[type-arg]
        batches.append(len(batch))
        clock[0] += 10.0
        return prefill(batch, tokens)

    def decoded(*given: object) -> object:
        clock[0] += 1.0
        return decode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    asked = [engine.submit(Request(user(f"How many? {seed}"), greedy(60))) for seed in range(24)]
    engine.step()
    for size in (5, 20, 80) * 3:
        budget.prompt.learn(size, 10.0 + 0.001 * size)
    monkeypatch.setattr(engine.core.runner, "prefill", taken)
    monkeypatch.setattr(engine.core.runner, "decode", decoded)
    for seed in range(3):
        asked.append(engine.submit(Request(user(f"What is it? {seed}"), greedy(60))))
        engine.step()
        engine.step()
    assert batches == []
    while clock[0] < 12:
        engine.step()
    assert batches == [3]
    for one in asked:
        run_down(engine, one)


def test_other_threads_may_read_prices_while_the_first_passes_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, fit, read = StepBudget(1024, 0.1), Price._fit, list[float]()

    def read_meanwhile(price: Price) -> None:
        read.append(budget.stats(1)["prompt_chunk_tokens"])
        fit(price)
        read.append(budget.stats(1)["prompt_chunk_tokens"])

    monkeypatch.setattr(Price, "_fit", read_meanwhile)
    for units in (100, 400):
        for price in (budget.prompt, budget.picture, budget.decode):
            price.learn(units, units / 1e4)
    assert len(read) == 12
    assert min(read) > 0
