"""An engine at the other end of a link, with its host in a thread instead of a process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import steering
from server.engine.local import LocalEngine, load_without_weights
from server.settings import Settings
from steering.child import host
from steering.child.client import ChildClient, wait_for
from steering.child.clock import StepClock
from steering.child.link import Link
from tests.server.fakes import checkpoint
from tests.waiting import PATIENCE


@dataclass
class Apart:
    """Both ends: what the worker has, and what steps."""

    engine: LocalEngine
    client: ChildClient
    own: steering.Engine
    clock: StepClock
    link: Link
    died: threading.Event


def alone(apart: Apart) -> steering.Engine:
    """Return an engine of the same model in this process."""
    return steering.Engine(apart.own.mllm, slots=4, threads=1, self_check=False, max_length=apart.own.max_length)


@pytest.fixture(scope="session")
def model() -> steering.MLLM:
    return steering.load(checkpoint(), device="cpu")


@pytest.fixture
def unread() -> steering.MLLM:
    """Return the model without its weights, as the worker has it."""
    return load_without_weights(Settings(model=str(checkpoint())))


@pytest.fixture
def apart(model: steering.MLLM, unread: steering.MLLM) -> Iterator[Callable[..., Apart]]:
    """Engines with the options that are given, each served by a host."""
    with ExitStack() as stack:

        def made(**options: Any) -> Apart:
            own = steering.Engine(model, **{"slots": 4, "max_waiting": 8, "threads": 1, "self_check": False} | options)
            ours, theirs = (Link(one, shares) for one, shares in zip(socket.socketpair(), (True, False), strict=True))
            clock, died = StepClock(), threading.Event()

            def serve() -> None:
                loaded = host.load(theirs, lambda tell: own)
                assert loaded is not None
                host.Host(theirs, loaded, clock, alone=lambda: None).run()

            stepping = threading.Thread(target=serve, daemon=True)
            stepping.start()
            facts, stats = wait_for(ours, lambda stage, share: None, died.set)
            client = ChildClient(unread, facts, ours, clock, stats, 60.0, died.set)
            engine = LocalEngine(client, facts.magnitudes)
            engine.start()

            def stop() -> None:
                engine.stop()
                own.stop()
                stepping.join(PATIENCE)
                assert not stepping.is_alive()
                for link in (ours, theirs):
                    link.close()

            stack.callback(stop)
            return Apart(engine, client, own, clock, theirs, died)

        yield made
