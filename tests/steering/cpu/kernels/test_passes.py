"""Passes of prompts that run as they are, but for attention: our own loops compute it where a step was linked with them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Pai, Request, Sage, Sampling, See
from steering.cpu.kernels import native
from steering.cpu.kernels.prompts import WITHIN
from steering.cpu.steps import CompiledSteps
from steering.protocol.readout import REGISTRY
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.cpu.conftest import check_same_answers
from tests.steering.cpu.kernels.conftest import PROCESSORS, Loops

EVERYTHING = Diagnose(frozenset(REGISTRY), causal=True, residual_rows="prompt")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transfer": {"interventions": [Sage(see=See(alpha=0.6))]},
    "scale": {"interventions": [Sage(see=See(alpha=0.7, reading="scale", shallow=families.LAYERS))]},
    "content": {"interventions": [Sage(see=See(alpha=0.6, spans="content", shallow=families.LAYERS))]},
    "add": {"interventions": [Sage(see=See(alpha=0.7, reading="add", shallow=families.LAYERS))]},
    "read": {"diagnose": EVERYTHING},
    "amplified": {"interventions": [Pai(amplify=0.5, first_layer=0)], "diagnose": EVERYTHING},
}


# Features that layers add; pictures that see themselves as a whole, of which the loops know nothing; windows; sinks
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "gemma3", "aya_vision", "gpt_oss"])
@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize(
    "loops", [0], indirect=True, ids=[PROCESSORS[0][0]]
)  # `test_prompts` runs them as all are built
def test_answers_with_kernels_equal_answers_without(
    make_engine: MakeEngine, loops: Loops, family: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside one another, in parts and whole, behind what is known."""
    options = {"prefill_budget": budget, "prefix_cache_bytes": 2**24}
    plain, ours = make_engine(family, **options), make_engine(family, **options)
    steps = CompiledSteps(ours.mllm, 1)
    ours.core.runner.passes.use(steps)
    steps.loops = loops
    calls: Counter[str] = Counter()
    call = native.Loops.__call__

    def counted(native_loops: native.Loops, name: str, *arguments: Any) -> Any:
        calls[name] += 1
        return call(native_loops, name, *arguments)

    monkeypatch.setattr(native.Loops, "__call__", counted)
    requests = {
        name: Request(families.example_messages(family, 1), Sampling(max_tokens=4, ignore_eos=True, logprobs=2), **kind)
        for name, kind in KINDS.items()
    }
    requests["words"] = Request(
        families.example_messages(family, 0), Sampling(max_tokens=4, ignore_eos=True, logprobs=2)
    )
    for several in (
        *([name] for name in requests),
        ["plain", "words", "transfer", "content", "add"],
        ["words", "read", "scale"],
    ):
        check_same_answers(ours, plain, [requests[name] for name in several])
    causal = (
        WITHIN[:1] if family == "gemma3" else WITHIN
    )  # of its prompts only those without pictures, which are not read
    assert calls.keys() == {loop.__name__ for loop in causal}


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_built_for_fewer_threads_than_torch_uses_are_not_called(
    make_engine: MakeEngine, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl")
    steps = CompiledSteps(engine.mllm, 1)
    engine.core.runner.passes.use(steps)

    class Refusing(native.Loops):
        def __init__(self) -> None:
            self.threads = 1

        def __call__(self, name: str, *arguments: Any) -> Any:
            raise RuntimeError("it was called")

    steps.loops = Refusing()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    request = Request(families.example_messages("qwen2_vl", 1), Sampling(max_tokens=1))
    if threads == 2:
        engine.generate([request])
    else:
        with pytest.raises(steering.Fault):
            engine.generate([request])
