"""Applications with a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from flask import Flask
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.journal import writer
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Sdk, Serve, journal_of


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for rows however busy the machine is; journals that are slow have tests of their own."""
    monkeypatch.setattr(writer, "PATIENCE", 60.0)
    monkeypatch.setattr(writer, "READERS", 60.0)


@pytest.fixture
def serve(engine: steering.Engine, vectors: Path, tmp_path: Path) -> Iterator[Serve]:
    """Applications with a journal of their own; on the real engine unless another one is given."""
    made: list[FlaskClient] = []

    def begin(other: FakeEngine | None = None, **settings: Any) -> FlaskClient:
        path = str(tmp_path / f"journal{len(made)}.db")
        chosen = Settings(**{"journal": path, "vectors": (str(vectors),), "slots": 4, **settings})
        made.append(create_app(chosen, engine=other or engine).test_client())  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for client in made:
        journal_of(client).close()


@pytest.fixture
def sdk(live: Callable[[Flask], str]) -> Iterator[Sdk]:
    """OpenAI's clients of applications, each of which listens on one address."""
    with ExitStack() as stack:
        urls: dict[FlaskClient, str] = {}

        def begin(client: FlaskClient, key: str = "none") -> openai.OpenAI:
            url = urls.setdefault(client, live(client.application))
            return stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))

        yield begin
