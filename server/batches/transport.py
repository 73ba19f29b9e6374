"""The ways to have a chat answered: by the server's own application in this process, or by a server at an address.

Both take the body of a request and return the response, so that every body that a server accepts is accepted here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import requests
from flask import Flask
from prometheus_client import CollectorRegistry
from werkzeug.test import Client

from probes.answering.base import Unanswered
from probes.answering.endpoint import SOURCE, Endpoint
from server.app import create_app
from server.batches.file import URL, BatchResponse, Problem
from server.batches.measured import Digests
from server.context import AppContext
from server.encode import dumps
from server.engine.runtime import Runtime, load
from server.settings import Settings
from server.telemetry.logs import request_id
from steering import VectorError

PATIENCE = 120.0
"""Seconds for which a full queue in this process is asked again."""


class Transport(Protocol):
    """A way to have chats answered, from several threads at once."""

    @property
    def model(self) -> str:
        """The name of the model that is served."""

    @property
    def identity(self) -> str:
        """All that the answers depend on besides the requests."""

    @property
    def models(self) -> frozenset[str]:
        """The names that a request may have as its model, presets included; empty if that is not known."""

    @property
    def at_once(self) -> int:
        """The number of requests that are worth sending at once."""

    @property
    def forces(self) -> bool:
        """True if given answers can be read."""

    @property
    def registry(self) -> CollectorRegistry | None:
        """The registry of the server's metrics, None if they are elsewhere."""

    def digests(self) -> Digests:
        """Return the digests of what is measured for the model, as of now."""

    def send(self, body: Mapping[str, Any]) -> BatchResponse:
        """Return the response to a chat; a failure to get one is its problem."""


class LocalTransport:
    """The application of a server, called without a network; its journal and metrics count answers under `source`."""

    forces = True

    def __init__(self, app: Flask, source: str = "batch") -> None:
        self._app, self._headers = app, {SOURCE: source}
        self.context: AppContext = app.extensions["helmsight"]
        serving = self.context.runtime.serving()
        self.model = serving.name
        self.identity = f"{serving.name} {serving.capabilities.fingerprint}"
        self.models = frozenset({self.model, *(f"{self.model}@{name}" for name in self.context.presets.at(serving))})
        self.at_once = max(1, int(serving.engine.stats()["slots"]))
        self.registry = self.context.metrics.registry

    def digests(self) -> Digests:
        serving = self.context.runtime.serving()
        vectors: dict[str, str] = {}
        for name in serving.store.names():
            with suppress(VectorError, OSError):
                vectors[name] = serving.store.get(name).identity
        calibration = serving.engine.calibration()
        return Digests(vectors, None if calibration is None else calibration.digest)

    def send(self, body: Mapping[str, Any]) -> BatchResponse:
        until = time.monotonic() + PATIENCE
        data = dumps(body).encode("utf-8", "surrogatepass")
        while True:
            response = Client(self._app).post(URL, data=data, content_type="application/json", headers=self._headers)
            if response.status_code != 429 or time.monotonic() > until:
                return BatchResponse(
                    response.status_code, response.get_json(silent=True), response.headers["X-Request-Id"]
                )
            time.sleep(0.2)  # one request may have more answers than there are slots


class RemoteTransport:
    """A server at an address; each thread has a connection of its own."""

    registry = None

    def __init__(self, endpoint: Endpoint, connections: ExitStack) -> None:
        self._endpoint, self._connections = endpoint, connections
        self._mine = threading.local()
        self.model = endpoint.model
        self.identity = endpoint.identity
        self.models = endpoint.models
        self.at_once = endpoint.concurrency
        self.forces = endpoint.is_helmsight

    def digests(self) -> Digests:
        return Digests(self._endpoint.digests())

    def send(self, body: Mapping[str, Any]) -> BatchResponse:
        try:
            response = self._endpoint.post(self._session(), body)
        except Unanswered as error:
            return BatchResponse(problem=Problem("no_answer", str(error)))
        try:
            body = response.json()
        except (requests.JSONDecodeError, RecursionError):
            return BatchResponse(
                problem=Problem("no_answer", f"{response.url} answered with something that is not JSON.")
            )
        return BatchResponse(response.status_code, body, request_id(response.headers.get("X-Request-Id")))

    def _session(self) -> requests.Session:
        if not hasattr(self._mine, "session"):
            self._mine.session = self._connections.enter_context(self._endpoint.open())
        session: requests.Session = self._mine.session
        return session


@contextmanager
def in_process(settings: Settings, source: str) -> Iterator[LocalTransport]:
    """Load the model of the settings and hold it until the block ends; nothing listens on a port.

    Keys are for clients of a port, so that those of the settings are not asked for.
    """
    settings = settings.model_copy(update={"api_keys": (), "api_key_file": None, "named_key_file": None})
    serving = load(settings)
    app = create_app(settings, runtime=Runtime(settings, serving))
    context: AppContext = app.extensions["helmsight"]
    try:
        yield LocalTransport(app, source)
    finally:
        serving.engine.stop()
        context.journal.close()


@contextmanager
def remote(
    base_url: str, model: str | None, at_once: int, timeout: float, source: str = "batch"
) -> Iterator[RemoteTransport]:
    """Connect to a server until the block ends; raises ValueError if there is none."""
    with ExitStack() as connections:
        endpoint = Endpoint(base_url, model=model, concurrency=at_once, timeout=timeout, source=source)
        yield RemoteTransport(endpoint, connections)
