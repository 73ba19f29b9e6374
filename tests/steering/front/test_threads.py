"""An engine runs in a thread of its own: many may ask it, and everyone is told when it stops or dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from steering import Engine, Fault, Request, Think
from steering.protocol.request import Result
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import assert_same, conversations, greedy
from tests.steering.front.conftest import PlainAnswer
from tests.steering.inside import sequences
from tests.waiting import PATIENCE, wait_for


def test_an_engine_is_started_once(running: Engine) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        running.start()


def test_many_threads_may_submit_at_once(running: Engine, plain_answer: PlainAnswer) -> None:
    chats = conversations("qwen2_vl")
    results: dict[int, Result] = {}

    def client(number: int) -> None:
        results[number] = running.submit(Request(chats[number % len(chats)], greedy(5))).result()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    for number in range(24):
        assert_same(results[number].choices[0], plain_answer("qwen2_vl", number % len(chats), 5))


def test_a_list_of_requests_may_be_larger_than_the_queue(make_engine: MakeEngine, plain_answer: PlainAnswer) -> None:
    chats = conversations("qwen2_vl")
    engine = make_engine("qwen2_vl", slots=3, max_waiting=4)
    engine.start()
    results = engine.generate(Request(chats[i % 3], greedy(2)) for i in range(15))
    engine.stop()
    assert [list(result.choices[0].token_ids) for result in results] == [
        plain_answer("qwen2_vl", i % 3, 2).tokens for i in range(15)
    ]


def test_tokens_of_a_stream_arrive_while_it_runs(running: Engine) -> None:
    completion = running.submit(Request(conversations("qwen2_vl")[0], greedy(400)))
    next(iter(completion))
    assert not completion.done
    completion.cancel()
    wait_for(lambda: running.stats()["running"] == 0)


def test_a_step_that_hangs_holds_up_nobody_who_gives_up(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl", max_step=PATIENCE)
    request = Request(conversations("qwen2_vl")[0], greedy(20))
    engine.generate([Request(request.messages, greedy(1))])
    decode, go_on, hangs = engine.core.runner.decode, threading.Event(), threading.Event()

    def hanging(*given: Any) -> Any:
        hangs.set()
        assert go_on.wait(timeout=PATIENCE)
        return decode(*given)

    monkeypatch.setattr(engine.core.runner, "decode", hanging)
    engine.start()
    completions = [engine.submit(request) for _ in range(2)]
    try:
        assert hangs.wait(timeout=PATIENCE)
        assert engine.healthy
        engine._max_step = 0.1
        threading.Timer(0.3, completions[0].cancel).start()
        with pytest.raises(Fault, match="cancelled"):
            completions[0].result()
        assert not engine.healthy
    finally:
        go_on.set()
    engine._max_step = PATIENCE
    wait_for(lambda: engine.healthy)
    assert len(completions[1].result().choices[0].token_ids) == 20
    engine.stop()


def test_stopping_lets_running_answers_finish_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    engine.generate([Request(conversations("qwen2_vl")[0], greedy(1))])
    engine.start()
    assert engine.stats()["generated_tokens"] == 0, "counted from the start"
    assert engine.healthy
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(50)))
    engine.stop(drain=PATIENCE)
    assert not engine.healthy
    assert len(completion.result().choices[0].token_ids) == 50
    with pytest.raises(Fault, match="shutting down"):
        engine.submit(Request(conversations("qwen2_vl")[0], greedy()))
    with pytest.raises(Fault, match="shutting down"):
        engine.generate([Request(conversations("qwen2_vl")[0], greedy())] * 9)


def test_stopping_without_patience_ends_running_and_waiting_requests(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    engine.start()
    completions = [engine.submit(Request(conversations("qwen2_vl")[0], greedy(400))) for _ in range(2)]
    engine.stop()
    for completion in completions:
        with pytest.raises(Fault, match="shutting down"):
            completion.result()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_stopping_ends_even_what_is_just_being_prefilled(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl", max_length=1024)
    entered, go_on = threading.Event(), threading.Event()
    real = engine.core.runner.prefill

    def prefill(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(timeout=PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(engine.core.runner, "prefill", prefill)
    completions = [engine.submit(Request(chat, greedy(400))) for chat in conversations("qwen2_vl")[:3]]
    engine.start()
    assert entered.wait(timeout=PATIENCE)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    time.sleep(0.1)
    go_on.set()
    stopping.join(timeout=PATIENCE)
    for completion in completions:
        with pytest.raises(Fault, match="shutting down"):
            completion.result()
        assert len(sequences(completion)[0].tokens) <= 2


def test_an_engine_that_dies_tells_everyone_who_waits(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    completions = [engine.submit(Request(conversations("qwen2_vl")[0], greedy(400))) for _ in range(2)]
    monkeypatch.setattr(engine.core.scheduler, "next_forks", lambda: 1 / 0)
    engine.start()
    for completion in completions:
        with pytest.raises(Fault, match="engine died"):
            completion.result()
    assert not engine.healthy
    with pytest.raises(Fault):
        engine.submit(Request(conversations("qwen2_vl")[0], greedy()))
    engine.stop()


def test_results_are_handed_over_as_they_come_and_the_rest_is_cancelled(make_engine: MakeEngine) -> None:
    engine, asked = make_engine("qwen2_vl", slots=2), []

    def requests() -> Iterator[Request]:
        for chat in conversations("qwen2_vl") * 10:
            asked.append(chat)
            yield Request(chat, greedy(2))

    stream = engine.stream(requests())
    first = next(stream)
    assert len(first.choices[0].token_ids) == 2
    assert len(asked) < 10
    stream.close()
    engine.step()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_engines_of_one_model_step_in_threads_of_their_own(make_engine: MakeEngine) -> None:
    """Each reads what its own layers added, of as many rows as its own step has."""
    said: dict[int, list[Any]] = {}

    def client(number: int, engine: Engine) -> None:
        request = Request(
            conversations("qwen2_vl")[number], greedy(12), Think(threshold=0.01), diagnose=["residual", "modality"]
        )
        for _ in range(3):
            results = engine.generate([request] * (number + 1))
            said.setdefault(number, []).append(
                [(one.choices[0].applied, one.choices[0].diagnostics) for one in results]
            )

    engines = [make_engine("qwen2_vl") for _ in range(2)]
    for number, engine in enumerate(engines):
        client(number, engine)
    alone, said = said, {}
    threads = [threading.Thread(target=client, args=both) for both in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert said == alone
