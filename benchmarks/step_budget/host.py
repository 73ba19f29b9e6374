"""Measure the host's part of passes on a GPU, without one: `python -m benchmarks.step_budget.host`.

Graphs are replaced by ones that compute nothing, on the embedded model, whose vocabulary is small: what is left is the work
of the engine's own thread, which a GPU need not wait for as long as it is shorter than the device's. Prompts are those of a
model with as many layers as one of 7B, so narrow that launching its operations is nearly all that an eager pass does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import steering
from steering.accel import prompt_graphs, prompt_step
from steering.accel.cuda_graphs import DecodeGraphs
from steering.bench.asking import chat, noise, pushes, words
from steering.bench.shapes import SHAPES, random_model
from steering.triton.capture import Captured

STEPS = 60
PROMPTS = 30
LAYERS = 28
KINDS: dict[str, Callable[[steering.MLLM], dict[str, Any]]] = {
    "plain": lambda mllm: {},
    "sampled, seeded, top_k 20, top_p 0.8": lambda mllm: {
        "sampling": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 1}
    },
    "5 log-probabilities": lambda mllm: {"sampling": {"logprobs": 5}},
    "steered, with focus and modality": lambda mllm: {
        "interventions": pushes(mllm, 1)[0],
        "diagnose": steering.Diagnose(frozenset({"focus", "modality"})),
    },
    "See": lambda mllm: {"interventions": steering.See(alpha=0.3)},
}


class NoCapture:
    """Stands in for the capture of graphs: a replay does nothing, and logits stay those of a random distribution."""

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
        outputs = run()
        if len(outputs) > 1 and outputs[1].ndim == 2:  # logits
            outputs[1].normal_(std=8.0)
        return (lambda: None), outputs


def milliseconds(mllm: steering.MLLM, answers: int, options: dict[str, Any]) -> float:
    """Return the median time of a step of so many answers that differ only in their prompts."""
    engine = steering.Engine(mllm, slots=answers, max_length=512, self_check=False)
    engine.core.runner.passes.use(DecodeGraphs(mllm, captures=NoCapture))
    engine.core.steps.overlap = True
    draw = random.Random(0)
    sampling = steering.Sampling(max_tokens=4 * STEPS, ignore_eos=True, **options.get("sampling", {}))
    rest = {name: value for name, value in options.items() if name != "sampling"}
    asked = [steering.Request(chat(words(draw, 12), noise((56, 56))), sampling, **rest) for _ in range(answers)]
    completions = [engine.submit(request) for request in asked]
    while not all(completion.first_at for completion in completions):
        engine.step()
    times = []
    for _ in range(STEPS + 10):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[10:])


def prompt_milliseconds(mllm: steering.MLLM, options: dict[str, Any], graphs: bool) -> float:
    """Return the median time of the pass of a prompt that runs eagerly, or in a graph."""
    engine = steering.Engine(mllm, slots=1, max_length=512, self_check=False)
    passes, times = engine.core.runner.passes, list[float]()
    if graphs:
        passes.use(DecodeGraphs(mllm, captures=NoCapture))
    run = passes.prompts

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        result = run(*args)
        times.append(time.perf_counter() - began)
        return result

    draw, picture = random.Random(0), noise((56, 56))
    settings = {"sampling": steering.Sampling(max_tokens=1, ignore_eos=True), **options}
    with (
        patch.object(passes, "prompts", timed),
        patch.multiple(prompt_graphs, PATIENCE=1, agree=lambda *args: True),
        patch.object(prompt_step, "pooled", lambda query, *args: torch.zeros_like(query)),
    ):
        for _ in range(PROMPTS + 10):
            engine.generate([steering.Request(chat(words(draw, 40), picture), **settings)])
    return 1000 * statistics.median(times[10:])


def main() -> None:
    """Print tables of the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--answers", nargs="+", type=int, default=[1, 32, 64, 256], help="(default: 1 32 64 256)")
    numbers = parser.parse_args().answers
    torch.set_num_threads(1)
    mllm = steering.load(device="cpu")
    print("| answers |", *(f"{number} (ms) |" for number in numbers))
    print("|---|" + "---:|" * len(numbers))
    for name, options in KINDS.items():
        print(f"| {name} |", *(f"{milliseconds(mllm, number, options(mllm)):.2f} |" for number in numbers), flush=True)
    narrow = replace(SHAPES["tiny"], text={**SHAPES["tiny"].text, "num_hidden_layers": LAYERS})
    mllm = random_model(narrow, torch.device("cpu"), torch.float32)
    print("\n| a prompt, 28 layers | eager (ms) | in a graph (ms) |\n|---|---:|---:|")
    for name, options in KINDS.items():
        if "sampling" not in options(mllm):  # which acts behind prompts
            times = (f"{prompt_milliseconds(mllm, options(mllm), graphs):.2f} |" for graphs in (False, True))
            print(f"| {name} |", *times, flush=True)


if __name__ == "__main__":
    main()
