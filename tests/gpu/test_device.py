"""Kernels alone, host waits in decode steps, graphs that share memory, and memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch

import steering
from steering.accel.cuda_graphs import DecodeGraphs
from steering.triton.capture import Capture
from tests.gpu.conftest import DEVICE, SETTINGS, Model, Start
from tests.steering.parallel.asking import requests, told

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]

GROWTH = 2**20
"""Bytes by which memory in use may differ after the same requests."""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernels_agree_with_float64(dtype: str) -> None:
    command = [sys.executable, "-m", "tests.steering.triton.kernel_checks", f"torch.{dtype}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["plain", "steered until", "see, transferred", "looking", "two images, read"])
def test_a_decode_step_waits_once_at_most(name: str, model: Model) -> None:
    mllm = steering.load(model("qwen2_vl"), dtype="bfloat16", device=DEVICE)
    engine = steering.Engine(mllm, **SETTINGS, compiled=True)
    request = requests(mllm)[name]
    engine.generate([request])  # kernels are compiled, and graphs captured
    completion = engine.submit(request)
    engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        while not completion.done:
            finished = engine.stats()["finished"]
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                engine.step()
            reads = engine.stats()["finished"] > finished  # what was measured of an answer that has ended
            assert reads or len(waits) <= 1, [str(wait.message) for wait in waits]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_a_graph_runs_on_when_others_of_its_memory_are_dropped() -> None:
    place, captured, drawn = torch.device(DEVICE), Capture(), torch.Generator().manual_seed(0)
    weight = torch.randn(8192, 1024, generator=drawn).to(place, torch.bfloat16)
    # Few rows: products are split, and their parts meet in torch's workspace.
    inputs = [torch.randn(rows, 8192, generator=drawn).to(place, torch.bfloat16) for rows in (8, 16, 33, 64)]
    graphs = [captured(partial(multiplied, states, weight), place) for states in inputs]
    held: list[list[torch.Tensor]] = []
    while graphs:
        for states, (replay, outputs) in zip(inputs[len(held) :], graphs, strict=True):
            torch.cuda.empty_cache()
            others = [torch.full((2**23,), torch.nan, device=place) for _ in range(8)]
            replay()
            check_product(outputs, states, weight)
            assert all(bool(other.isnan().all()) for other in others)
        del replay
        held.append(graphs.pop(0)[1])  # its results stay, it does not
    replay, outputs = captured(partial(multiplied, inputs[0], weight), place)
    replay()
    check_product(outputs, inputs[0], weight)


def multiplied(states: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [states @ weight]


def check_product(outputs: list[torch.Tensor], states: torch.Tensor, weight: torch.Tensor) -> None:
    """Check the result of a replay, and forget it."""
    expected = states.double() @ weight.double()
    assert (outputs[0].double() - expected).norm() < 1e-2 * expected.norm()
    outputs[0].zero_()


@torch.inference_mode()
def test_after_a_capture_that_failed_memory_is_freed_and_others_are_captured() -> None:
    captured, numbers = Capture(), torch.arange(2**20, dtype=torch.float32, device=DEVICE)
    with pytest.raises(RuntimeError, match="captur"):
        captured(lambda: [numbers * float(numbers.sum())], torch.device(DEVICE))
    replay, (output,) = captured(lambda: [numbers * 2], torch.device(DEVICE))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    large = torch.zeros(2**28, dtype=torch.uint8, device=DEVICE)
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    numbers.fill_(3)
    replay()
    assert bool((output == 6).all())


def test_memory_does_not_grow(start: Start) -> None:
    engine = start("qwen2_vl", dtype="bfloat16")
    asked, graphs = requests(engine.mllm), engine.compilation.steps
    assert isinstance(graphs, DecodeGraphs)
    rounds: list[tuple[int, ...]] = []
    for _ in range(12):
        told(engine, asked)
        while engine.compilation.prepare_next():  # graphs take memory, and others are wanted with each round
            pass
        torch.cuda.synchronize()
        sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        rounds.append((*sizes, len(graphs), len(graphs.prompts), len(graphs.pictures)))
    same = [(first, second) for first, second in itertools.pairwise(rounds[2:]) if first[2:] == second[2:]]
    assert len(same) >= 3, rounds
    for place, growth in enumerate((GROWTH, 64 * GROWTH)):
        assert sum(second[place] - first[place] for first, second in same[-3:]) < growth, rounds
