"""An engine at the other end of a link, with its host in a thread instead of a process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import steering
from server.engine.local import LocalEngine
from server.engine_process import host
from server.engine_process.clock import StepClock
from server.engine_process.link import Link
from server.engine_process.reading import PromptReader
from server.engine_process.remote import RemoteEngine, connected
from server.settings import Settings
from tests.server.fakes import checkpoint


@dataclass
class Apart:
    """Both ends: what the worker has, and what steps."""

    engine: RemoteEngine
    own: steering.Engine
    clock: StepClock
    link: Link
    died: threading.Event


@pytest.fixture(scope="session")
def model() -> steering.MLLM:
    return steering.load(checkpoint(), device="cpu")


def reader_of(folder: Path, fingerprint: str, length: int = 4096) -> PromptReader:
    """Return a prompt reader that has loaded."""
    able: Any = SimpleNamespace(fingerprint=fingerprint, context_length=length)
    made = PromptReader(Settings(model=str(folder)), able)
    for thread in threading.enumerate():
        if thread.name == "helmsight-reader":
            thread.join()
    return made


@pytest.fixture(scope="session")
def reader(model: steering.MLLM) -> PromptReader:
    assert model.path is not None
    return reader_of(model.path, model.fingerprint, model.context_length)


@pytest.fixture
def apart(model: steering.MLLM, reader: PromptReader) -> Iterator[Callable[..., Apart]]:
    """Engines with the options that are given, each served by a host; prompts with pictures are read on this side."""
    with ExitStack() as stack:

        def made(**options: Any) -> Apart:
            own = steering.Engine(model, **{"slots": 4, "max_waiting": 8, "threads": 1, "self_check": False} | options)
            ours, theirs = (Link(one) for one in socket.socketpair())
            clock, died = StepClock(), threading.Event()

            def serve() -> None:
                loaded = host.load(theirs, lambda tell: LocalEngine(own, nullcontext()))
                assert loaded is not None
                host.Host(theirs, loaded, clock, alone=lambda: None).run()

            stepping = threading.Thread(target=serve, daemon=True)
            stepping.start()
            engine = connected(ours, clock, lambda stage, share: None, 60.0, died.set)
            engine.read = reader
            engine.start()

            def stop() -> None:
                engine.stop()
                own.stop()
                stepping.join(20)
                assert not stepping.is_alive()
                for link in (ours, theirs):
                    link.close()

            stack.callback(stop)
            return Apart(engine, own, clock, theirs, died)

        yield made
