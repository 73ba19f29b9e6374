"""A real engine that all tests of the server share, and helpers to talk to an application in memory or on a port."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient
from gunicorn.config import Config
from PIL import Image
from werkzeug.serving import make_server

import steering
from server import settings as server_settings
from server.app import create_app
from server.journal.database import Database, Place, open_database
from server.process.worker import Worker
from server.serving import gunicorn_options
from server.settings import Settings
from tests.server.fakes import FakeEngine, checkpoint
from tests.server.journal.journals import Postgres, running_postgres
from tests.server.web.browser import contexts, visit  # noqa: F401 -- fixtures
from tests.waiting import PATIENCE


@pytest.fixture(scope="session", autouse=True)
def no_journal_at_home() -> Iterator[None]:
    """Turn the journal off unless a test names one: no test may write to the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_settings, "DEFAULT_JOURNAL", "off")
        patch.setenv("HELMSIGHT_JOURNAL", "off")
        yield


@pytest.fixture(scope="session")
def engine() -> Iterator[steering.Engine]:
    """Yield the embedded model's engine, running."""
    engine = steering.Engine(steering.load(checkpoint(), device="cpu"), slots=4, max_waiting=8, threads=1)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def vectors(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random vector for the model, one for another model, and a damaged file."""
    folder = tmp_path_factory.mktemp("vectors")
    shape = engine.mllm.num_layers, engine.mllm.hidden_size
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name, fingerprint in (("modality-preference", engine.mllm.fingerprint), ("stranger", "0" * 32)):
        vector = steering.SteeringVector(
            name, direction, *(torch.ones(shape[0]) for _ in range(3)), (1, 2), fingerprint
        )
        vector.save(folder / f"{name}.safetensors")
    (folder / "damaged.safetensors").write_bytes(b"not a vector")
    return folder


@pytest.fixture(scope="session")
def settings(vectors: Path) -> Settings:
    """Return settings with the test vectors."""
    return Settings(vectors=(str(vectors),), slots=4, max_waiting=8)


@pytest.fixture(scope="session")
def app(engine: steering.Engine, settings: Settings) -> Flask:
    """Return the application on the real engine."""
    return create_app(settings, engine=engine)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """Return a client in memory of the application on the real engine."""
    return app.test_client()


@pytest.fixture
def fake() -> FakeEngine:
    """Return an engine that does what the test says."""
    return FakeEngine()


@pytest.fixture
def live() -> Iterator[Callable[[Flask], str]]:
    """Serve applications on free loopback ports; returns the base URL."""
    with ExitStack() as stack:

        def serve(app: Flask) -> str:
            server = make_server("127.0.0.1", 0, app, threaded=True)
            server.daemon_threads = True  # type: ignore[attr-defined]
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.port}"

        yield serve


@pytest.fixture
def serve_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Serve applications with the worker that gunicorn runs, its loop in a thread; returns the port. `accesslog`: a file."""
    with ExitStack() as stack:

        def serve(app: Flask, accesslog: str | None = None) -> int:
            cfg = Config()
            for name, value in gunicorn_options(app.extensions["helmsight"].settings).items():
                cfg.set(name, value)
            cfg.set("accesslog", accesslog)
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)
            worker = Worker(1, os.getpid(), [listener], None, 30, cfg, cfg.logger_class(cfg))
            monkeypatch.setattr(os, "getppid", os.getpid)
            worker.wsgi = app
            worker.prepare()
            thread = threading.Thread(target=worker.run, daemon=True)
            port = listener.getsockname()[1]
            thread.start()

            def stop() -> None:
                worker.alive = False
                thread.join(PATIENCE)
                worker.tmp.close()
                for handler in worker.log.access_log.handlers:
                    handler.close()

            stack.callback(stop)
            return int(port)

        yield serve


def data_uri(image: Image.Image | None = None, kind: str = "PNG", **options: Any) -> str:
    """Return a picture as a data: URI."""
    image = image or Image.new("RGB", (84, 84), "red")
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


TOLD = [
    {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": data_uri()}},
        {"type": "text", "text": "The star is blue.", "span": "context"},
        {"type": "text", "text": "What colour is the star?"},
    ]}
]  # fmt: skip
"""A chat about a picture and a context that contradicts it."""


def user(*parts: str) -> dict[str, Any]:
    """Return a user message of texts and data: URIs."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def ask(client: FlaskClient, *parts: str, **fields: Any) -> Any:
    """Post a chat and return the response; default: a short greedy answer."""
    body = {"messages": [user(*(parts or ("What colour is it?",)))], "max_tokens": 8, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body, buffered=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Run a PostgreSQL server as long as the tests run."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the setting of a journal that does not exist yet, in each kind of database."""
    if request.param == "sqlite":
        return str(tmp_path / "journal.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new()


@pytest.fixture
def database(place: str) -> Iterator[Database]:
    """Yield an empty open journal."""
    database = open_database(Place.of(place))
    yield database
    database.close()
