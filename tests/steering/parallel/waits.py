"""Host waits for a GPU, step by step of each request alone, also with models of other families; and what is embedded.

It runs in a process of its own, because the pretended devices stay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import steering
from steering import Request, Sampling
from steering.accel import prompt_graphs, prompt_step
from steering.accel.cuda_graphs import DecodeGraphs
from steering.model.images import is_text_input
from steering.model.mllm import MLLM
from steering.prompt.layout import build_prompt
from steering.triton.capture import Captured
from tests import families
from tests.steering.accel.test_cuda_graphs import again
from tests.steering.parallel import pretend
from tests.steering.parallel.asking import requests
from tests.steering.triton.reference import pooled

IN_GRAPHS = ("plain", "text only", "steered until", "see, transferred", "looking", "projected out", "dola", "vista")
"""The requests that also run in graphs, as captures refuse to wait and copy nothing, and nothing around them should."""
FORKED = ("qwen2_vl", "qwen3_5")
"""The families of which a prompt is copied, too: with keys and values alone, and with recurrent states."""


def waits(model: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    pretend.install()
    mllm = steering.load(model, dtype="float32", device=pretend.NAME)
    engine = steering.Engine(mllm, slots=6, max_length=512, self_check=False, prefix_cache_bytes=2**24)
    assert engine.stats()["kv_bytes"], "allotted at the start"
    asked = requests(mllm)
    waits_by_request = {name: waited(engine, request) for name, request in asked.items()}
    in_graphs = {name: first_in_graphs(mllm, asked[name]) for name in IN_GRAPHS}
    by_family: dict[str, Any] = {}
    unlike: dict[str, list[str]] = {}
    forks: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in families.FAMILIES:
            mllm = steering.load(families.checkpoint(family, Path(folder)), dtype="float32", device=pretend.NAME)
            chats = {number: families.example_messages(family, number) for number in counts(family)}
            by_family[family] = {str(number): first_steps(mllm, chat) for number, chat in chats.items()}
            if family in FORKED:
                forks[family] = first_steps(mllm, chats[1], n=2)
                in_graphs[family] = first_in_graphs(
                    mllm, Request(chats[1], Sampling(max_tokens=2)), prefix_cache_bytes=2**24
                )
            unlike[family] = [
                f"{number} pictures: {name}"
                for number, chat in chats.items()
                for name in differing(mllm, build_prompt(mllm, chat).inputs)
            ]
    by_what = {"requests": waits_by_request, "in graphs": in_graphs, "families": by_family, "forks": forks}
    return by_what | {"unlike": unlike}


def first_in_graphs(mllm: MLLM, request: Request, **options: int) -> tuple[list[str], int]:
    """Return the lines that waited in the first step of a request whose prompt is in a graph, and how many graphs ran."""
    engine = steering.Engine(mllm, slots=2, max_length=512, self_check=False, **options)
    graphs = DecodeGraphs(mllm, captures=lambda: captured)
    engine.core.runner.passes.use(graphs)
    with patch.object(prompt_graphs, "PATIENCE", 0), patch.object(prompt_step, "pooled", pooled):
        waited(engine, request)  # whose results are compared
        taken = graphs.prompts.taken
        first, *_ = waited(engine, request, most=1)
    return first, graphs.prompts.taken - taken


def captured(run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
    """Return a capture of a call that copies nothing to or from the device."""
    run()  # fills caches
    with pretend.apart():
        run()
    return again(run, device)


def first_steps(mllm: MLLM, chat: list[dict[str, Any]], n: int = 1) -> list[list[str]]:
    engine = steering.Engine(mllm, slots=n, max_length=512, self_check=False)
    return waited(engine, Request(chat, Sampling(max_tokens=9, ignore_eos=True), n=n), most=2)


def counts(family: str) -> tuple[int, ...]:
    return (1, 2) if family in families.IMAGE_ONLY else (1, 2, 0)


@torch.inference_mode()
def differing(mllm: MLLM, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the decoder's inputs that are not, to the bit, those of the wrapper by itself."""
    expected: dict[str, Any] = {}

    def intercept(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        expected.update(kwargs)

    handle = mllm.decoder.register_forward_pre_hook(intercept, with_kwargs=True)
    mllm.model.model(**{name: value.to(mllm.device) for name, value in inputs.items()}, use_cache=False)
    handle.remove()
    if hasattr(mllm.model.model, "rope_deltas"):
        mllm.model.model.rope_deltas = None
    pictures = {name: value for name, value in inputs.items() if not is_text_input(name)}
    embedded = mllm.embed(inputs, mllm.image_features(pictures) if pictures else None)
    names = ("inputs_embeds", "position_ids", "deepstack_visual_embeds", "visual_pos_masks")
    ours = {name: value for name, value in embedded.arguments.items() if name in names}
    if expected.get("position_ids") is None:
        del ours["position_ids"]
    return [name for name, value in ours.items() if not alike(value, expected[name])]


def alike(ours: Any, expected: Any) -> bool:
    pairs = zip(ours, expected, strict=True) if isinstance(ours, list) else [(ours, expected)]
    return all(torch.equal(first.cpu(), second.cpu()) for first, second in pairs)


def waited(engine: steering.Engine, request: Request, most: int = 100) -> list[list[str]]:
    """Return the lines that waited in each step of a request, or in its first ones."""
    completion, steps = engine.submit(request), []
    while not completion.done and len(steps) < most:
        with pretend.watch() as lines:
            engine.step()
        steps.append(lines)
    return steps
