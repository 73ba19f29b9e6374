"""An application in front of vLLM servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flask import Flask

from server.app import create_app
from server.engine import vllm
from server.engine.runtime import Runtime
from server.settings import Settings


@contextmanager
def front(settings: Settings) -> Iterator[Flask]:
    """Yield an application whose servers were found and checked."""
    runtime = Runtime(settings, make=vllm.load)
    app = create_app(settings, runtime=runtime)
    runtime._load()
    assert runtime.error is None, runtime.error
    yield app
    runtime.drain(0)
