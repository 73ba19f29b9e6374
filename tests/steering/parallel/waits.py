"""Host waits for a GPU, step by step of each request alone, also with models of other families.

It runs in a process of its own, because the pretended devices stay.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import steering
from steering import Request, Sampling
from tests import families
from tests.steering.parallel import pretend
from tests.steering.parallel.asking import requests


def waits(model: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    pretend.install()
    mllm = steering.load(model, dtype="float32", device=pretend.NAME)
    engine = steering.Engine(mllm, slots=6, max_length=512, self_check=False, prefix_cache_bytes=2**24)
    assert engine.stats()["kv_bytes"], "allotted at the start"
    waits_by_request = {name: waited(engine, request) for name, request in requests(mllm).items()}
    by_family = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in families.FAMILIES:
            mllm = steering.load(families.checkpoint(family, Path(folder)), dtype="float32", device=pretend.NAME)
            engine = steering.Engine(mllm, slots=1, max_length=512, self_check=False)
            chat = families.example_messages(family, 1)
            by_family[family] = waited(engine, Request(chat, Sampling(max_tokens=9, ignore_eos=True)), most=2)
    return {"requests": waits_by_request, "families": by_family}


def waited(engine: steering.Engine, request: Request, most: int = 100) -> list[list[str]]:
    """Return the lines that waited in each step of a request, or in its first ones."""
    completion, steps = engine.submit(request), []
    while not completion.done and len(steps) < most:
        with pretend.watch() as lines:
            engine.step()
        steps.append(lines)
    return steps
