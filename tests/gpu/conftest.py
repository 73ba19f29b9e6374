"""The device that is tested, and the models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import RequestError
from steering.core.compilation import pays
from tests.steering.parallel.asking import requests, small, told

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS: dict[str, Any] = {"slots": 24, "max_length": 1024, "prefix_cache_bytes": 2**24}

Model = Callable[[str], Path]
Expected = Callable[[str], dict[str, Any]]
Start = Callable[..., steering.Engine]


def in_graphs(mllm: steering.MLLM) -> bool:
    """Return True where a server runs a model's steps in CUDA graphs.

    With experts it does so in bfloat16 on two generations: for others torch reads on the host which token goes where.
    """
    if mllm.device.type != "cuda" or not pays(mllm):
        return False
    experts = any(name.endswith("experts") for name, _ in mllm.decoder.named_modules())
    generation, _ = torch.cuda.get_device_capability(mllm.device)
    return not experts or (mllm.dtype == torch.bfloat16 and generation in (9, 10))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a function from a family to the folder of its model."""
    return functools.cache(lambda family: small(tmp_path_factory.mktemp(family) / "model", family))


@pytest.fixture(scope="session")
def expected(model: Model) -> Expected:
    """Return a function from a family to the CPU's results of all requests that it knows, each computed alone."""

    def on_the_cpu(family: str) -> dict[str, Any]:
        mllm = steering.load(model(family), device="cpu", dtype="float32")
        engine = steering.Engine(mllm, **{**SETTINGS, "prefix_cache_bytes": 0}, self_check=False)
        results: dict[str, Any] = {}
        for name, request in requests(mllm).items():
            with suppress(RequestError):  # some interventions need parts that not every decoder has
                results |= told(engine, {name: request})
        assert len(results) > 18
        return results

    return functools.cache(on_the_cpu)


@pytest.fixture
def start(model: Model) -> Iterator[Start]:
    """Return a function (family, **loading) that starts an engine as a server has it, with CUDA graphs."""
    with ExitStack() as stack:

        def started(family: str, **loading: Any) -> steering.Engine:
            mllm = steering.load(model(family), **{"dtype": "float32", "device": DEVICE} | loading)
            engine = steering.Engine(mllm, **SETTINGS, compiled=in_graphs(mllm))
            stack.callback(engine.stop)
            engine.start()
            return engine

        yield started
