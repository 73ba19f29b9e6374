"""Fake vLLM servers of the embedded model, and clients of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import steering
from server.engine.local import load_without_weights
from server.settings import Settings
from steering.child.facts import ModelFacts
from steering.front.input_processor import Limits
from steering.vllm.client import VllmClient
from steering.vllm.servers import Server, Servers
from steering.vllm.supported import Supported
from tests.steering.parallel.asking import small
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.fake import FakeVllm, facts_of

Serve = Callable[..., FakeVllm]
Connect = Callable[..., VllmClient]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="session")
def model(folder: Path) -> steering.MLLM:
    return steering.load(folder, device="cpu")


@pytest.fixture(scope="session")
def own(model: steering.MLLM) -> steering.Engine:
    """Return an engine of the same model in this process."""
    return steering.Engine(model, slots=4, threads=1)


@pytest.fixture(scope="session")
def answers(folder: Path, model: steering.MLLM) -> PlainAnswers:
    return PlainAnswers(folder, [folder / "vectors"], model)


@pytest.fixture
def serve(answers: PlainAnswers) -> Iterator[Serve]:
    """Servers that run, with the options that are given."""
    with ExitStack() as stack:

        def served(**options: Any) -> FakeVllm:
            facts = facts_of(answers, **{name: options.pop(name) for name in ("slots", "can") if name in options})
            server = FakeVllm(**{"answer": answers.answer, "facts": facts} | options).start()
            stack.callback(server.stop)
            return server

        yield served


@pytest.fixture
def connect(own: steering.Engine, folder: Path) -> Iterator[Connect]:
    """Clients of servers, with the options that are given."""
    with ExitStack() as stack:

        def connected(*fakes: FakeVllm, **options: Any) -> VllmClient:
            mllm = load_without_weights(Settings(model=str(folder)))
            ModelFacts.of(own, None).complete(mllm)
            servers = Servers([Server(fake.url, fake.key) for fake in fakes])
            for server in servers:
                server.look()
            facts = servers.facts()
            slots = sum(server.slots for server in servers)
            limits = Limits(facts.context_length, 16, mllm.focus_layers, slots)
            client = VllmClient(mllm, limits, servers, Supported.of(facts.can), **{"max_waiting": 64} | options)
            client.start()
            stack.callback(client.stop)
            return client

        yield connected
