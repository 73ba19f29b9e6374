"""A server that follows a script, asked without waiting and without a key."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from probes.answering import endpoint
from tests.probes.answering.scripted_server import Server


@pytest.fixture(autouse=True)
def no_waits_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
