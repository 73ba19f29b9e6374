"""An engine in another process answers as one in this process, says as much of what goes wrong, and is missed when gone."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from server.app import create_app
from server.engine.local import LocalEngine
from server.engine.runtime import Runtime
from server.engine.served import ServedCompletion
from server.process.worker import STOP
from server.settings import Settings
from steering import (
    Auto,
    Busy,
    ContextOverflow,
    Diagnose,
    Fault,
    Request,
    RequestError,
    Sampling,
    Steer,
    Tools,
    VectorError,
    VectorStore,
)
from steering.child import client as child_client
from steering.child.client import ChildClient
from steering.child.clock import StepClock
from steering.child.facts import ModelFacts
from steering.child.link import Link
from steering.messages import serialization
from tests.server.journal.rows import journal_of, rows_of
from tests.steering.child.conftest import Apart
from tests.steering.parallel.asking import chat, differences, picture, requests, said
from tests.waiting import PATIENCE, wait_for

Make = Callable[..., Apart]
LONG = Sampling(max_tokens=400, ignore_eos=True, temperature=0)


def ask(engine: Any, request: Request) -> ServedCompletion:
    with engine.turn() as turn:
        completion: ServedCompletion = turn.submit(request)
        return completion


def test_every_answer_is_the_one_that_this_process_would_give(model: steering.MLLM, apart: Make) -> None:
    there, asked = apart(max_waiting=40), requests(model)
    own = steering.Engine(model, slots=4, threads=1, self_check=False)
    running = [ask(there.engine, request) for request in asked.values()]
    answers = [completion.result() for completion in running]
    for name, expected, found in zip(asked, own.generate(asked.values()), answers, strict=True):
        # Which requests share a step depends on when they arrive, and with it the last digits.
        assert not differences(said(found), said(expected), name, tolerance=5e-4)
        assert [one.text for one in found.choices] == [one.text for one in expected.choices], name
        assert (found.prompt_tokens, found.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "Tell me a story."}], chat(picture(9, 99, 200))])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_pieces_add_up_to_the_answer(apart: Make, messages: Any, logprobs: int | None) -> None:
    there = apart()
    request = Request(messages, Sampling(max_tokens=20, ignore_eos=True, temperature=0, logprobs=logprobs))
    whole = (
        ask(there.engine, request).result().choices[0]
    )  # one after the other: beside others its last digits may differ
    chunks = list(completion := ask(there.engine, request))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [one for chunk in chunks for one in chunk.logprobs] == list(whole.logprobs or ())
    assert chunks[-1].choice == whole
    assert [chunk.choice for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert completion.first_at is not None
    assert completion.first_at <= time.monotonic()
    assert (completion.generated(0), completion.text_of(0)) == (20, whole.text)
    assert [chunk.choice for chunk in ask(there.engine, request).whole()] == [whole]


def test_who_does_not_wait_is_told_when_there_is_more(apart: Make) -> None:
    news = threading.Semaphore(0)
    completion = ask(apart().engine, Request([{"role": "user", "content": "Hi!"}], Sampling(max_tokens=6)))
    chunks: list[Any] = []
    for chunk in completion.paused(news.release):
        if chunk is None:
            assert news.acquire(timeout=PATIENCE)
        else:
            chunks.append(chunk)
    assert chunks[-1].choice is not None


def test_known_beginnings_are_counted(apart: Make) -> None:
    there = apart(prefix_cache_bytes=2**24)
    request = Request([{"role": "user", "content": "Which colour is it? " * 20}], Sampling(max_tokens=2))
    assert ask(there.engine, request).result().cached_tokens == 0
    assert ask(there.engine, request).result().cached_tokens > 32


@pytest.mark.parametrize(
    ("request_", "kind", "match"),
    [
        (Request([{"role": "user", "content": "a " * 9000}], Sampling(max_tokens=4)), ContextOverflow, "context"),
        (Request([{"role": "user", "content": "a"}], Sampling(max_tokens=4, logit_bias={10**6: 1.0})), RequestError, "bias"),
        (Request([{"role": "user", "content": "a"}], Sampling(max_tokens=4), n=9), RequestError, "'n' must be at most"),
        (
            Request(chat(), Sampling(max_tokens=4), tools=Tools([{"type": "function", "function": {"name": "look"}}])),
            RequestError,
            "tools",
        ),
    ],
)  # fmt: skip
def test_refusals_say_the_same(
    model: steering.MLLM, apart: Make, request_: Request, kind: type[RequestError], match: str
) -> None:
    own = steering.Engine(model, slots=4, threads=1, self_check=False)
    with pytest.raises(kind, match=match) as here:
        own.submit(request_)
    with pytest.raises(kind) as there:
        ask(apart().engine, request_)
    assert (str(there.value), there.value.param, there.value.code) == (
        str(here.value),
        here.value.param,
        here.value.code,
    )


def test_errors_are_read_as_they_were_told() -> None:
    def raised(error: Any) -> Any:
        return serialization.read(serialization.written(error))

    busy = raised(Busy(7, 3.5))
    assert isinstance(busy, Busy)
    assert busy.retry_after == 3.5
    assert "7 answers" in str(busy)
    assert isinstance(raised(VectorError("not here")), VectorError)
    assert isinstance(raised(OSError("no disk")), OSError)
    assert str(raised(type("Unheard", (Exception,), {})("what it says"))) == "Unheard: what it says"
    assert isinstance(raised(SystemExit("what it says")), Fault)


def test_a_full_queue_refuses(apart: Make) -> None:
    there = apart(slots=1, max_waiting=1)
    request = Request([{"role": "user", "content": "Hi!"}], LONG)
    running = [ask(there.engine, request) for _ in range(2)]
    with pytest.raises(Busy, match="already waiting") as refused, there.engine.turn() as turn:
        turn.submit(request)
    assert refused.value.retry_after >= 1
    with pytest.raises(Busy), there.engine.turn() as turn:
        turn.check()
    for completion in running:
        completion.cancel()
        with pytest.raises(Fault, match="cancelled"):
            completion.result()
    wait_for(lambda: not (there.engine.stats()["waiting"] or there.engine.stats()["running"]))
    with there.engine.turn() as turn:
        turn.check()


def test_a_queue_that_one_group_fills_takes_several_of_another(apart: Make) -> None:
    there = apart(slots=1, max_waiting=16)
    request = Request([{"role": "user", "content": "Hi!"}], LONG)
    taken = []
    for group, asked in (("many", 40), ("few", 3)):
        for _ in range(asked):
            with suppress(Busy), there.engine.turn(group) as turn:
                turn.check()
                taken.append((group, turn.submit(request)))
    assert Counter(group for group, _ in taken) == {"many": 15, "few": 3}
    for _, completion in taken:
        completion.cancel()


@pytest.mark.parametrize("diagnose", [None, Diagnose(["modality"])])
def test_what_was_cancelled_says_how_far_it_came(apart: Make, diagnose: Diagnose | None) -> None:
    there = apart()
    completion = ask(there.engine, Request([{"role": "user", "content": "Hi!"}], LONG, diagnose=diagnose))
    chunks = iter(completion)
    text = "".join(next(chunks).text for _ in range(5))
    completion.cancel()
    assert 5 <= completion.generated(0) < 400
    assert completion.text_of(0).startswith(text)
    assert completion.first_at is not None
    assert not [chunk for chunk in chunks if chunk.choice is not None]


def test_the_way_is_found_there(model: steering.MLLM, apart: Make) -> None:
    auto = Auto(VectorStore(str(model.path) + "/vectors").get("modality-preference"))
    request = Request(chat(picture(200, 30, 40)), Sampling(max_tokens=4), auto)
    own = steering.Engine(model, slots=4, threads=1, self_check=False)
    begun: list[Any] = []
    with apart().engine.turn() as turn:
        found = turn.decide(request, begun.append)
        assert turn.submit(found).result().choices[0].applied is not None
    expected = steering.decide(own, request)
    (there,), (here,) = ([one for way in found.asked.values() for one in way.steers] for found in (found, expected))
    assert (there.scale, there.layers, there.tokens) == (here.scale, here.layers, here.tokens)
    assert there.auto is not None
    assert not differences(dict(there.auto), dict(here.auto))
    assert begun


def test_looking_for_the_way_can_be_given_up(model: steering.MLLM, apart: Make) -> None:
    there = apart(slots=1)
    auto = Auto(VectorStore(str(model.path) + "/vectors").get("modality-preference"))
    running = ask(there.engine, Request([{"role": "user", "content": "Hi!"}], LONG))
    with there.engine.turn() as turn, pytest.raises(Fault):
        turn.decide(
            Request(chat(picture(1, 2, 3)), Sampling(max_tokens=4), auto),
            lambda completion: threading.Timer(0.3, completion.cancel).start(),
        )
    running.cancel()


def test_vectors_are_checked_there(model: steering.MLLM, apart: Make) -> None:
    there = apart()
    vector = VectorStore(str(model.path) + "/vectors").get("modality-preference")
    there.engine.check_steer(Steer.to(vector, "text"), 1)
    there.engine.check_auto(Auto(vector))
    with pytest.raises(VectorError):
        there.engine.check_steer(Steer(steering.SteeringVector(
            "other", vector.direction, vector.weight, vector.mean_abs, vector.std, vector.layers, "0" * 32
        ), 1.0))  # fmt: skip


def test_it_says_what_it_serves_and_counts(model: steering.MLLM, apart: Make) -> None:
    there = apart()
    assert there.engine.capabilities == LocalEngine(there.own).capabilities
    ask(there.engine, Request([{"role": "user", "content": "Hi!"}], Sampling(max_tokens=3, ignore_eos=True))).result()
    assert there.engine.stats()["generated_tokens"] == 3
    other = steering.Engine(model, slots=4, threads=1, self_check=False)
    assert there.engine.magnitudes().tolist() == steering.magnitudes(other).tolist()
    found, expected = there.engine.bins["batch_size"], there.own.bins["batch_size"]
    assert (found.bounds, found.cumulative(), found.total) == (expected.bounds, expected.cumulative(), expected.total)


def test_what_is_looked_at_together_is_asked_for_once_and_not_for_long(
    apart: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = apart()
    engine, client, asked = there.engine, there.client, list[str]()
    ask_ = client._ask
    monkeypatch.setattr(client, "_ask", lambda name, *rest, **more: asked.append(name) or ask_(name, *rest, **more))
    monkeypatch.setattr(child_client, "GLANCE", PATIENCE)
    assert engine.stats()["slots"] == 4
    assert "batch_size" in engine.bins
    assert asked == ["stats"]
    monkeypatch.setattr(child_client, "GLANCE", 0.5)
    monkeypatch.setattr(client._link, "send", lambda message: None)  # as to a process that hangs
    began = time.monotonic()
    assert engine.stats()["slots"] == 4
    assert "batch_size" in engine.bins
    assert time.monotonic() - began >= 0.5
    assert asked == ["stats"] * 2, "both are told by what was known, after one wait"
    monkeypatch.undo()


def test_a_step_that_hangs_is_not_healthy(apart: Make) -> None:
    engine = apart().client
    engine._clock = StepClock()  # of a host that does nothing
    assert engine.healthy
    engine._clock.step()
    assert engine.healthy
    engine._max_step = 0.01
    time.sleep(0.02)
    assert not engine.healthy
    engine._clock.rest()
    assert engine.healthy


def test_what_runs_is_answered_before_it_stops(apart: Make) -> None:
    there = apart()
    request = Request(
        [{"role": "user", "content": "Hi!"}], Sampling(max_tokens=60, ignore_eos=True), diagnose=["modality"]
    )
    running = [ask(there.engine, request) for _ in range(3)]
    there.engine.stop(drain=30)
    for completion in running:
        assert completion.result().completion_tokens == 60
        assert completion.result().choices[0].diagnostics is not None
    assert not there.engine.healthy
    with pytest.raises(Fault), there.engine.turn() as turn:
        turn.submit(request)
    with pytest.raises(Fault), there.engine.turn() as turn:
        turn.check()
    assert not there.died.is_set()


def test_what_cannot_be_sent_fails_alone(apart: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    there = apart()
    request = Request([{"role": "user", "content": "Hi!"}], Sampling(max_tokens=3), diagnose=["modality"])
    with monkeypatch.context() as patch:
        patch.setattr(there.own.core.runner.recorders["attention"], "take", lambda one: one.spec.diagnose and object())
        with pytest.raises(Fault, match="object cannot be sent"):
            ask(there.engine, request).result()
        assert ask(there.engine, Request(request.messages, Sampling(max_tokens=3))).result().choices
    assert ask(there.engine, request).result().choices[0].diagnostics


def test_large_pictures_arrive_whole(model: steering.MLLM, apart: Make) -> None:
    noise = torch.randint(0, 256, (1500, 1400, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    request = Request(chat(Image.fromarray(noise.numpy())), Sampling(max_tokens=4, temperature=0, logprobs=3))
    (expected,) = steering.Engine(model, slots=4, threads=1, self_check=False).generate([request])
    assert not differences(said(ask(apart().engine, request).result()), said(expected))


def test_who_waits_hears_that_the_other_process_is_gone(apart: Make) -> None:
    there = apart()
    request = Request([{"role": "user", "content": "Hi!"}], LONG)
    completion = ask(there.engine, request)
    next(iter(completion))
    there.link._sock.shutdown(2)
    with pytest.raises(Fault, match="process has ended"):
        completion.result()
    assert there.died.wait(PATIENCE)
    assert not there.engine.healthy
    with pytest.raises(Fault):
        ask(there.engine, request)
    assert there.engine.stats()["slots"] == 4  # what was known last


def test_what_was_given_before_the_process_was_gone_is_in_the_journal(apart: Make, tmp_path: Path) -> None:
    there, path = apart(), str(tmp_path / "journal.db")
    app = create_app(Settings(vectors=(), journal=path, journal_texts=True), engine=there.engine)  # type: ignore[arg-type]
    client = app.test_client()
    asked = {"messages": [{"role": "user", "content": "Hi!"}], "stream": True, "max_tokens": 400, "ignore_eos": True}
    pieces: list[str] = []
    code = None
    for event in client.post("/v1/chat/completions", json=asked).iter_encoded():
        if (line := event.removeprefix(b"data: ").strip()) == b"[DONE]":
            break
        code = json.loads(line).get("error", {}).get("code")
        pieces += [choice["delta"]["content"] for choice in json.loads(line).get("choices", [])]
        if len(pieces) == 40:
            there.link._sock.shutdown(2)
    assert code is not None
    assert 40 <= len(pieces) < 400
    (row,) = rows_of(client, 1)
    journal_of(client).close()
    assert row["finish_reason"] == "error"
    assert row["usage"]["completion_tokens"] >= len(pieces) - 1, (
        "the first event has no text, and some tokens have none"
    )
    assert row["texts"]["answer"] == "".join(pieces)


def test_whoever_waits_for_a_process_that_hangs_is_told_when_the_time_is_over(
    apart: Make, unread: steering.MLLM
) -> None:
    facts = ModelFacts.of(apart().own, None)
    ours, theirs = (Link(one) for one in socket.socketpair())  # whose other end nobody reads
    died = threading.Event()
    engine = ChildClient(unread, facts, ours, StepClock(), {"slots": 4, "max_waiting": 8}, 60.0, died.set)
    engine.start()
    noise = torch.zeros((3000, 1500, 3), dtype=torch.uint8)
    light, heavy = (
        Request(messages, LONG)
        for messages in ([{"role": "user", "content": "Hi!"}], chat(Image.fromarray(noise.numpy())))
    )
    with ThreadPoolExecutor(6) as pool:  # the pictures fill the socket, so that not even the end can be told
        asked = [pool.submit(ask, engine, one) for one in (light, *[heavy] * 4, light)]
        time.sleep(0.5)
        began = time.monotonic()
        engine.stop(drain=0.5)
        assert 0.5 <= time.monotonic() - began < 0.5 + STOP
        for one in asked:
            assert isinstance(one.exception(timeout=PATIENCE), Fault)
    assert not died.is_set()
    theirs.close()


def test_a_process_that_ends_while_it_loads_says_nothing_of_the_model() -> None:
    ours, theirs = (Link(one) for one in socket.socketpair())
    theirs.send([["told", 0, "reading the weights", 0.5]])
    theirs.close()
    died, failed = threading.Event(), threading.Event()
    stages: list[str] = []

    def make(settings: Settings, tell: Any) -> Any:
        return child_client.wait_for(ours, lambda stage, share: stages.append(stage), died.set)

    runtime = Runtime(Settings(), on_failure=failed.set, make=make)
    runtime._load()
    assert died.is_set()
    assert not failed.is_set()
    assert (stages, runtime.error) == (["reading the weights"], None)
    ours.close()
