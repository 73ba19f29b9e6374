"""A fault of an intervention or recorder, behind a step or always, fails only the requests that it concerns.

Callers may queue while the engine steps.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Engine, Fault, Pai, Request, Sampling, Vcd
from steering.protocol.sequence import Sequence
from steering.runner.passes import Passes
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.core.faults.test_faults import CONTRASTED, FAMILY, SAMPLING, Once, answers
from tests.waiting import PATIENCE

EVERY = frozenset({"focus", "modality", "decay", "residual", "tam"})


def asked() -> list[Request]:
    """Plain; observed; under SAGE; under PAI; plain."""
    chats = [families.example_messages(FAMILY, 1 + i % 2, seed=i, text="What is this? " * (1 + i)) for i in range(5)]
    options: list[dict[str, Any]] = [
        {}, {"diagnose": Diagnose(EVERY)}, {"interventions": CONTRASTED}, {"interventions": [Pai()]}, {},
    ]  # fmt: skip
    return [Request(chat, SAMPLING, **more) for chat, more in zip(chats, options, strict=True)]


CONCERNED = {
    "attention": {1, 2},  # SAGE's See rests on it
    "states": {1, 2},
    "residual": {1},
    "sage.see": {2},
    "sage.think": {2},
    "sage.generate": {2},
    "contrast.pai": {3},
}


def parts(engine: Engine) -> dict[str, Any]:
    return {**engine.core.runner.recorders, **engine.core.runner.interventions}


def an_engine(make_engine: MakeEngine) -> Engine:
    return make_engine(FAMILY, slots=8, prefill_budget=400)


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> list[Any]:
    """Return the answers to `asked` without faults."""
    return answers(an_engine(make_engine), asked())


@pytest.mark.parametrize("method", ["record", "take"])
@pytest.mark.parametrize("name", CONCERNED)
def test_what_raises_behind_a_step_fails_those_it_concerns(
    name: str, method: str, make_engine: MakeEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(make_engine)
    for at, behind in itertools.product((1, 3), (False, True)):
        once = Once(getattr(parts(engine)[name], method), at, behind)
        with monkeypatch.context() as patch:
            patch.setattr(parts(engine)[name], method, once)
            got = answers(engine, asked())
        failed = {number for number, answer in enumerate(got) if answer is None}
        # Every answer that ends is asked what was measured, whether it concerns it or not.
        assert len(failed) <= 1 if method == "take" else failed <= CONCERNED[name], (at, behind)
        assert failed if once.calls >= at else not failed
        assert [got[i] for i in range(5) if i not in failed] == [expected[i] for i in range(5) if i not in failed]
        assert not engine.core.steps.alive
    assert answers(engine, asked()) == expected


@pytest.mark.parametrize(
    ("name", "method"), [("contrast.pai", "decode"), ("sage.see", "decode"), ("residual", "record")]
)
def test_what_always_raises_fails_those_it_concerns(
    name: str, method: str, make_engine: MakeEngine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(make_engine)

    class Broken(type(parts(engine)[name])):  # type: ignore[misc]
        pass

    def broken(*_: Any) -> None:
        raise RuntimeError("out of luck")

    Broken.__module__ = type(parts(engine)[name]).__module__
    setattr(Broken, method, lambda self, *_: broken())
    monkeypatch.setattr(parts(engine)[name], "__class__", Broken)
    got = answers(engine, asked())
    assert {number for number, answer in enumerate(got) if answer is None} == CONCERNED[name]
    assert [got[i] for i in range(5) if i not in CONCERNED[name]] == [
        expected[i] for i in range(5) if i not in CONCERNED[name]
    ]


def test_a_last_token_that_cannot_be_read_ends_in_a_fault(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in silence: the one who waits for it is told."""
    engine = make_engine(FAMILY, slots=2)
    monkeypatch.setattr(engine.core.runner.recorders["attention"], "take", lambda sequence: 1 / 0)
    engine.start()
    try:
        completion = engine.submit(asked()[0])
        found: list[BaseException] = []

        def wait() -> None:
            try:
                completion.result()
            except Fault as fault:
                found.append(fault)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert "division by zero" in str(found[0])
        assert engine.stats()["faults"] == 1
    finally:
        engine.stop()


@pytest.mark.parametrize("contrasted", [False, True])
def test_nothing_of_a_faulty_answer_stays_in_any_slot(
    contrasted: bool, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one, which ends with the same step, leaves a hole that it is moved into; nor of its twin's."""
    engine = make_engine(FAMILY, slots=4)
    decode, decoded = Passes.decode, []

    def spoiling(self: Passes, running: list[Sequence], *fed: Any) -> Any:
        batch, passed = decode(self, running, *fed)
        decoded.append(len(running))
        if len(decoded) == 2:
            for tensor in engine.core.runner.pool.tensors:
                tensor[1 : len(running), :, -1] = torch.nan
            passed.computed.logits[1:] = torch.nan
        return batch, passed

    short, long = (replace(SAMPLING, max_tokens=count, ignore_eos=True) for count in (3, 9))
    first = Request(asked()[0].messages, short)
    second = Request(asked()[1].messages, long, interventions=[Vcd()] if contrasted else ())
    monkeypatch.setattr(Passes, "decode", spoiling)
    got = answers(engine, [first, second])
    assert got[0] is not None
    assert got[1] is None
    assert decoded[1] == (3 if contrasted else 2)
    assert not any(bool(tensor.isnan().any()) for tensor in engine.core.runner.pool.tensors)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns so often that they meet in the middle of things."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_many_callers_queue_while_the_engine_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, slots=4, max_waiting=10_000)
    request = Request([{"role": "user", "content": "Hi"}], Sampling(max_tokens=1))
    end, problems = time.monotonic() + 2, []

    def call() -> None:
        while time.monotonic() < end and not problems:
            try:
                engine.submit(request).cancel()
            except steering.SteeringError as error:
                problems.append(error)

    engine.start()
    try:
        callers = [threading.Thread(target=call) for _ in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert engine.healthy
        assert not problems
        assert engine.submit(request).result().choices[0].finish_reason == "length"
    finally:
        engine.stop()
