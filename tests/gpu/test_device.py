"""Kernels alone, host waits in decode steps, and memory."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import steering
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
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                engine.step()
            assert len(waits) <= 1, [str(wait.message) for wait in waits]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow(start: Start) -> None:
    engine = start("qwen2_vl", dtype="bfloat16")
    asked = requests(engine.mllm)
    used = []
    for _ in range(12):
        told(engine, asked)
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    (allocated, reserved), (later, most) = used[-6], used[-1]
    assert later - allocated < GROWTH, used
    assert most - reserved < 64 * GROWTH, used
