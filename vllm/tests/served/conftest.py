"""Our own engine, and clients of vLLM servers of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import steering
from demo import CHECKPOINT
from server.engine.local import load_without_weights
from server.settings import Settings
from steering import SteeringVector, VectorStore
from steering.child.facts import ModelFacts
from steering.front.input_processor import Limits
from steering.vllm.client import VllmClient
from steering.vllm.servers import Server, Servers
from steering.vllm.supported import Supported


@contextmanager
def connected(own: steering.Engine, folder: Path, *urls: str) -> Iterator[VllmClient]:
    """Yield a client of servers of the model in a folder, which `own` runs too."""
    mllm = load_without_weights(Settings(model=str(folder)))
    ModelFacts.of(own, None).complete(mllm)
    servers = Servers([Server(url) for url in urls])
    for server in servers:
        server.look()
    facts = servers.facts()
    limits = Limits(facts.context_length, 4, mllm.focus_layers, 16)
    client = VllmClient(mllm, limits, servers, Supported.of(facts.can), max_waiting=1024)
    client.start()
    try:
        yield client
    finally:
        client.stop()


@pytest.fixture(scope="session")
def folder() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def own(folder: Path) -> steering.Engine:
    return steering.Engine(steering.load(folder, device="cpu"), slots=8, threads=1)


@pytest.fixture(scope="session")
def vector(folder: Path) -> SteeringVector:
    return VectorStore(folder / "vectors").get("modality-preference")


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of logs and of the compile cache, which the servers of a session share."""
    return tmp_path_factory.mktemp("vllm")
