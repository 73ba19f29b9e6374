"""The step budget on machines that are made up: the simulation is what the engine does, and both do what is wanted."""

from __future__ import annotations

import random
import time

import pytest

import steering
from benchmarks.step_budget.prices import ARRIVALS, MACHINES, Arrival, Machine, poisson
from benchmarks.step_budget.simulation import FixedChunk, Simulation
from benchmarks.step_budget.sleeping import SLOTS, Clock, Sleeping, arrivals
from steering.bench.asking import chat, words
from steering.core.budget import StepBudget

BOUND = 0.1


class Virtual(Clock):
    """Time passes where somebody sleeps, and nowhere else."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture(scope="module")
def mllm() -> steering.MLLM:
    return steering.load(device="cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Virtual:
    clock = Virtual()
    monkeypatch.setattr(time, "monotonic", clock.now)
    return clock


@pytest.mark.parametrize("name", MACHINES)
def test_the_engine_takes_as_long_as_the_simulation(name: str, mllm: steering.MLLM, clock: Virtual) -> None:
    machine = MACHINES[name]
    sleeping = Sleeping(machine, mllm, BOUND, clock, slow=1.0)
    arrivals_run, measured = sleeping.run(sleeping.requests(12, 8), arrivals(machine, 12))
    simulated = Simulation(machine, StepBudget(1024, BOUND), SLOTS, noise=0.0).run(arrivals_run)
    assert measured.rate == pytest.approx(simulated.rate, rel=0.2)
    assert measured.first_p50 == pytest.approx(simulated.first_p50, rel=0.2)
    assert measured.gap_p99 == pytest.approx(simulated.gap_p99, rel=0.2)


@pytest.mark.parametrize("name", MACHINES)
def test_a_prompt_beside_answers_takes_little_longer_than_alone(name: str, mllm: steering.MLLM, clock: Virtual) -> None:
    """300 tokens beside 8 answers, within 1.5 times alone and one decode."""
    machine = MACHINES[name]
    sleeping = Sleeping(machine, mllm, BOUND, clock, slow=1.0)
    engine = sleeping.engine
    running = [engine.submit(request) for request in texts([20] * 8, 400)]
    while not all(completion.first_at for completion in running):
        engine.step()
    assert len(engine.core.scheduler.running) == 8
    took = []
    for request in texts([300] * 8, 2):
        began = clock.now()
        completion = engine.submit(request)
        engine.result_of(completion)
        assert completion.first_at is not None
        took.append((completion.first_at - began) / (machine.prefill(completion.prompt_tokens) + machine.decoding(8)))
    assert sorted(took[3:])[2] < 1.5
    assert max(took) < 2.5, "while it learns"
    engine.stop()


def texts(lengths: list[int], answer: int) -> list[steering.Request]:
    draw, sampling = random.Random(0), steering.Sampling(max_tokens=answer, ignore_eos=True)
    return [steering.Request(chat(words(draw, length)), sampling) for length in lengths]


def run(machine: Machine, budget: StepBudget, requests: list[Arrival]) -> tuple[float, float, float]:
    outcome = Simulation(machine, budget, noise=0.05, gap=BOUND).run(requests)
    return outcome.rate, outcome.gap_p99, outcome.first_p50


def test_on_a_gpu_bursts_with_pictures_are_answered_as_by_the_best_chunk() -> None:
    machine = MACHINES["h100-7b"]
    requests = ARRIVALS["pictures, 64 at once"](machine)[:128]
    rate, gap, first = run(machine, StepBudget(1024, BOUND), requests)
    best = max(run(machine, FixedChunk(chunk, machine, BOUND), requests) for chunk in (256, 512, 1024, 2048))
    crumbs = run(machine, FixedChunk(16, machine, BOUND), requests)
    assert rate > 0.9 * best[0]
    assert gap < 1.1 * BOUND
    assert first < 1.1 * best[2]
    assert rate > 5 * crumbs[0]


def test_requests_come_as_often_as_they_are_to() -> None:
    machine = MACHINES["cpu-wide"]
    arriving = poisson(machine, lambda draw: (100, 0, 10), 400, 0.5)
    seconds = machine.token * 100 + machine.decoding(32) * 10 / 32
    assert arriving[-1].at == pytest.approx(400 * seconds / 0.5, rel=0.2)
