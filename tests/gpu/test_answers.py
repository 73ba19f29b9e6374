"""Answers, states and readouts of a GPU are those of a CPU, in every family, eager and in graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import steering
from tests import families
from tests.gpu.conftest import DEVICE, SETTINGS, Expected, Model, Start, in_graphs
from tests.steering.parallel.asking import differences, requests, told

pytestmark = pytest.mark.gpu

WITHIN = 2e-3
"""Largest difference in float32, relative above 1: other kernels sum in other orders."""
HALF = 5e-2
"""Largest relative distance, in half precision, between a graph's numbers and those of eager steps."""
ROUNDS = 3
"""Steps that are frequent are captured in the first round, and graphs are compared with eager steps."""
UNLIKE = ("qwen2_vl", "qwen3_vl", "internvl", "gemma3", "gemma4", "qwen3_5", "lfm2_vl", "gpt_oss", "qwen3_vl_moe")
"""Families whose steps have different parts."""
FORCED = ("text only", "plain", "steered", "see, transferred", "see, scaled", "looking", "icd", "pai")
"""Requests that every family knows; their answers are given, so that all steps compute the same tokens."""
PATIENT = 10
"""Prompts until theirs is captured and compared."""
MORE_THAN_ONE = torch.cuda.device_count() > 1


@pytest.mark.parametrize("family", families.ANSWERING)
def test_float32_is_that_of_a_cpu(family: str, start: Start, expected: Expected) -> None:
    check(start(family), expected(family))


@pytest.mark.skipif(not MORE_THAN_ONE, reason="needs two GPUs")
@pytest.mark.parametrize("loading", [{"device": "cuda:1"}, {"device": "auto", "device_map": "auto"}], ids=str)
def test_another_gpu_and_several_compute_the_same(loading: dict[str, Any], start: Start, expected: Expected) -> None:
    check(start("qwen2_vl", **loading), expected("qwen2_vl"))


def check(engine: steering.Engine, expected: dict[str, Any]) -> None:
    """Ask for everything at once, again when graphs are captured, and one by one."""
    asked = {name: request for name, request in requests(engine.mllm).items() if name in expected}
    for _ in range(ROUNDS):
        assert differences(expected, told(engine, asked), tolerance=WITHIN) == []
    for name, request in asked.items():
        assert differences(expected[name], told(engine, {name: request})[name], tolerance=WITHIN) == [], name
    stats = engine.stats()
    assert stats["faults"] == 0
    assert not in_graphs(engine.mllm) or stats["compiled_steps"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", UNLIKE if DEVICE == "cuda" else UNLIKE[:1])  # half precision takes a CPU long
def test_graphs_are_as_eager_steps_in_half_precision(family: str, dtype: str, start: Start, model: Model) -> None:
    eager = steering.Engine(steering.load(model(family), dtype=dtype, device=DEVICE), **SETTINGS, overlap=False)
    graphs = start(family, dtype=dtype)
    for name in FORCED:
        theirs = numbers(eager, name)
        for _ in range(PATIENT):
            apart = (numbers(graphs, name) - theirs).norm() / theirs.norm()
            assert apart < HALF, name
    assert not in_graphs(graphs.mllm) or graphs.stats()["compiled_steps"] > 0


def numbers(engine: steering.Engine, name: str) -> torch.Tensor:
    """Return the prompt's residual stream after every layer, and each step's largest log-probability of a given answer."""
    request = replace(requests(engine.mllm)[name], forced="The star is red.", states=True)
    (answer, *_) = told(engine, {name: request})[name]
    return torch.cat(
        [torch.tensor(answer["states"]).flatten(), torch.tensor([token[0] for token in answer["logprobs"]])]
    )
