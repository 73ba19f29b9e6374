"""A fault in one stage of a step: every other answer is right, the failed one is right or an error, nothing is left over."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import steering
from steering import (
    Auto,
    Choice,
    Diagnose,
    Engine,
    Fault,
    Generate,
    Icd,
    Pai,
    Request,
    Sage,
    Sampling,
    See,
    Steer,
    SteeringVector,
    Think,
    Vcd,
)  # fmt: skip
from steering.interventions.dola import Dola
from steering.interventions.look_at import LookAt
from steering.interventions.published.agla import Agla
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only
from steering.interventions.published.opera import Opera
from steering.interventions.published.vista import Vista
from steering.runner import choice
from tests import families
from tests.steering.conftest import MakeEngine

FAMILY = "qwen2_vl"
SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
CONTRASTED = Sage(See(alpha=0.3), Think(gamma=0.7, threshold=0.01), Generate(weight=0.5))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steered": {"steering": True},
    "sage": {"interventions": CONTRASTED},
    "refreshed": {"interventions": [Generate(weight=0.5, refresh=2)]},
    "vcd": {"interventions": [Vcd()]},
    "icd": {"interventions": [Icd()]},
    "pai": {"interventions": [Pai()]},
    "m3id": {"interventions": [M3id()]},
    "dola": {"interventions": [Dola(premature=[0, 1])]},
    "dola contrasted": {"interventions": [Dola(premature=[0, 1]), Vcd()]},
    "agla": {"interventions": [Agla()]},
    "vista": {"interventions": [Vista()]},
    "only": {"interventions": [Only()]},
    "opera": {"interventions": [Opera(scale=300.0, candidates=2)]},
    "looking": {"interventions": [LookAt(bias=2.0)]},
    "three": {"n": 3, "sampling": replace(SAMPLING, temperature=1.5, seed=3)},
    "three contrasted": {"n": 2, "interventions": CONTRASTED},
    "baseline": {"baseline": True, "interventions": [Vcd()]},
}
STAGES = {
    "embed": ("runner", "embed"),
    "prefill": ("runner", "prefill"),
    "fork": ("runner", "fork"),
    "first token": ("runner", "next_tokens"),
    "mask": ("generate", "_mask"),
    "resume": ("branches", "resumed"),
    "pair": ("branches", "pair"),
    "sample": ("module", "sample"),
    "decode": ("runner", "_decode"),
    "read": ("runner", "read"),
}


ALWAYS = {"embed", "prefill", "first token", "sample", "decode", "read"}
TWINS = {"pair", "resume"}
STAGES_OF = {
    "sage": ALWAYS | TWINS | {"mask"},
    "refreshed": ALWAYS | TWINS | {"mask"},
    "vcd": ALWAYS | TWINS,
    "icd": ALWAYS | TWINS,
    "pai": ALWAYS | TWINS,
    "m3id": ALWAYS | TWINS,
    "agla": ALWAYS | TWINS,
    "dola contrasted": ALWAYS | TWINS,
    "three": ALWAYS | {"fork"},
    "three contrasted": ALWAYS | TWINS | {"mask", "fork"},
    "baseline": ALWAYS | TWINS,
}
"""The stages that requests of each kind pass; all other kinds pass `ALWAYS`."""
ALIKE = {"embed", "first token", "sample"}
"""In which kinds hardly differ: asked of the plainest, and of those that have most to lose."""


def stages_of(kind: str) -> list[str]:
    """Return the stages that are to fail under a kind."""
    least = STAGES_OF.get(kind, ALWAYS)
    most = kind in ("plain", "refreshed", "vcd", "three", "three contrasted")
    return [stage for stage in STAGES if stage in least and (most or stage not in ALIKE)]


def vector(engine: Engine) -> SteeringVector:
    mllm = engine.mllm
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(mllm.num_layers)
    return SteeringVector("test", direction, 0.3 * ones, ones, ones, (0, 1), mllm.fingerprint)


def requests(engine: Engine, kind: str) -> list[Request]:
    """Return a request of the kind between two plain ones, one of which is observed."""
    chats = [families.example_messages(FAMILY, 1 + i % 2, seed=i, text="What is this? " * (1 + i)) for i in range(3)]
    options = {"sampling": SAMPLING} | KINDS[kind]
    if options.pop("steering", False):
        options["interventions"] = [Steer(vector(engine), 0.9)]
    return [
        Request(chats[0], SAMPLING, diagnose=Diagnose()),
        steering.decide(engine, Request(chats[1], diagnose=Diagnose(), **options)),
        Request(chats[2], SAMPLING),
    ]


class Once:
    """Raises at one call of a function, and calls it at all others, or after it did (then its work is done, and lost)."""

    def __init__(self, real: Callable[..., Any], at: int, behind: bool):
        self.real, self.at, self.behind, self.calls = real, at, behind, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.behind:
            raise torch.OutOfMemoryError("out of luck")
        out = self.real(*args, **kwargs)
        if self.calls == self.at:
            raise torch.OutOfMemoryError("out of luck")
        return out


def told(choice: Choice) -> tuple[Any, ...]:
    """Everything in which a choice could differ, rounded where batches may differ."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 3)
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value

    baseline = None if choice.baseline is None else choice.baseline.token_ids
    return choice.token_ids, baseline, rounded(choice.applied), rounded(choice.diagnostics)


def answers(engine: Engine, asked: list[Request]) -> list[list[tuple[Any, ...]] | None]:
    """Return the answer to each request, None if it failed."""
    completions = [engine.submit(request) for request in asked]
    for _ in range(200):
        if all(completion.done for completion in completions):
            break
        engine.step()
    else:
        pytest.fail("Some would wait for ever.")
    out: list[list[tuple[Any, ...]] | None] = []
    for completion in completions:
        try:
            out.append([told(choice) for choice in completion.result().choices])
        except Fault:
            out.append(None)
    engine.step()  # what has ended leaves
    return out


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlap"])
def make_engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> MakeEngine:
    """Make engines that read tokens at once, and such that read them behind the next launch."""
    return partial(make_engine, overlap=request.param)


def an_engine(make_engine: MakeEngine) -> Engine:
    return make_engine(FAMILY, slots=6, prefill_budget=400)


def place_of(engine: Engine, stage: str) -> tuple[Any, str]:
    """Return the object with the function of a stage, and the function's name."""
    places = {
        "runner": engine.core.runner,
        "branches": engine.core.steps.branches,
        "generate": engine.core.runner.interventions["sage.generate"],
        "module": choice,
    }
    where, name = STAGES[stage]
    return places[where], name


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> Callable[[str], Any]:
    """Return a function from a kind to its requests' answers without faults."""

    def of(kind: str) -> Any:
        engine, calls = an_engine(make_engine), {}
        with pytest.MonkeyPatch.context() as patch:
            for stage in STAGES:
                place, name = place_of(engine, stage)
                calls[stage] = Once(getattr(place, name), 0, behind=False)
                patch.setattr(place, name, calls[stage])
            told = answers(engine, requests(engine, kind))
        assert None not in told
        assert {stage for stage, once in calls.items() if once.calls} == STAGES_OF.get(kind, ALWAYS)
        return told

    return functools.cache(of)


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_ends_one_request_at_most(
    kind: str, make_engine: MakeEngine, expected: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(make_engine)
    asked = requests(engine, kind)
    for stage in stages_of(kind):
        place, name = place_of(engine, stage)
        for at, behind in itertools.product((1, 2), (False, True)):
            once = Once(getattr(place, name), at, behind)
            with monkeypatch.context() as patch:
                patch.setattr(place, name, once)
                got = answers(engine, asked)
            failed = [number for number, answer in enumerate(got) if answer is None]
            assert len(failed) <= 1, (stage, at, behind, failed)
            for number, answer in enumerate(got):
                assert answer is None or answer == expected(kind)[number], (stage, at, behind, number)
            stats = engine.stats()
            assert stats["running"] == stats["waiting"] == 0, (stage, at, behind)
            assert not engine.core.steps.alive, (stage, at, behind)
            if once.calls < at:
                break
    assert answers(engine, asked) == expected(kind)


def test_a_fault_while_the_way_is_found_is_that_request_s(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FAMILY, slots=4)
    chat = families.example_messages(FAMILY, 1, text="Text context: it is closed.\nIs it open?")
    request = Request(chat, SAMPLING, Auto(vector(engine)))
    expected = answers(engine, [steering.decide(engine, request)])
    for at in (1, 2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.runner, "prefill", Once(engine.core.runner.prefill, at, behind=False))
            try:
                assert answers(engine, [steering.decide(engine, request)]) == expected
            except Fault:
                engine.step()
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert answers(engine, [steering.decide(engine, request)]) == expected


def test_a_prompt_that_always_fails_ends_alone(
    make_engine: MakeEngine, expected: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(make_engine)
    real = engine.core.runner.next_tokens

    def next_tokens(sequences: Any, logits: torch.Tensor) -> Any:
        if any(sequence.twin is not None for sequence in sequences):
            raise RuntimeError("out of luck")
        return real(sequences, logits)

    monkeypatch.setattr(engine.core.runner, "next_tokens", next_tokens)
    first, _, last = expected("sage")
    assert answers(engine, requests(engine, "sage")) == [first, None, last]
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_step_that_is_run_again_has_the_memory_of_the_first(
    make_engine: MakeEngine, expected: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = an_engine(make_engine)
    real, held = engine.core.runner.passes.decode, []

    def decode(*args: Any) -> Any:
        passed = real(*args)
        if not held:
            held.append(weakref.ref(passed[1].computed.logits))
            raise torch.OutOfMemoryError("out of luck")
        assert held[0]() is None
        return passed

    monkeypatch.setattr(engine.core.runner.passes, "decode", decode)
    assert answers(engine, requests(engine, "sage")) == expected("sage")
    assert held
