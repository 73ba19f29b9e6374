"""A server as `make serve` starts it, whose steps are compiled when a test says so; and the plain path beside it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

import steering
from server.app import create_app
from server.settings import Settings
from steering.cpu import compiling
from steering.cpu.packages.store import _digest
from steering.cpu.start import VARIANTS
from steering.cpu.steps import CompiledSteps
from tests.server.process.servers import Server
from tests.server.served.answers import Answer
from tests.server.served.kinds import Kind, Pictures
from tests.server.served.model import KEPT
from tests.waiting import PATIENCE, wait_for

CHAT = "/v1/chat/completions"
NAME = "served"
IMPATIENT = Path(__file__).parent / "impatient"
"""Folder whose `sitecustomize.py` lets compiling run beside tests, not behind them."""
READY = 300
"""Seconds that each replica may take to start on a busy machine."""
_JOURNALS = tempfile.TemporaryDirectory(prefix="helmsight-journals-")
COMPILING = 1800
"""Seconds that compiling all steps may take."""


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings that a test's server and the plain path share."""
    return {
        "model": str(folder),
        "name": NAME,
        "vectors": (str(folder / "vectors"),),
        "journal": os.path.join(_JOURNALS.name, f"{str(folder).replace(os.sep, '-')}.db"),
    }


class Plain:
    """Requests answered alone, in this process: nothing is compiled, nothing is cached."""

    def __init__(self, folder: Path, dtype: str = "auto"):
        mllm = steering.load(folder, dtype=dtype, device="cpu", name=NAME)
        self.engine = steering.Engine(
            mllm, slots=8, threads=1, image_cache_bytes=0, prefix_cache_bytes=0, compiled=False
        )
        self.engine.start()
        self.app: Flask = create_app(Settings(**settings_of(folder)), engine=self.engine)
        self._client = self.app.test_client()
        self._known: dict[tuple[Any, ...], Answer] = {}

    @property
    def presets(self) -> list[str]:
        return [one["id"] for one in self._client.get("/v1/models").json["data"] if "preset" in one]

    def answer(self, kind: Kind, pictures: Pictures, **more: Any) -> Answer:
        """Return the answer to a kind of request, to which `more` fields are added."""
        place = kind.name, pictures, *sorted(more.items())
        if place not in self._known:
            self._known[place] = asked(kind, pictures, self.post, **more)
        return self._known[place]

    def post(self, body: Mapping[str, Any]) -> Answer:
        return posted(self._client, body)

    def close(self) -> None:
        self.engine.stop()


def posted(client: FlaskClient, body: Mapping[str, Any]) -> Answer:
    """Return the answer to a request, computed in this process."""
    written = json.dumps(body)  # Flask's own would sort keys, which a template may write into the prompt
    response = client.post(CHAT, data=written, content_type="application/json", buffered=True)
    return Answer.of(response.status_code, response.text, response.content_type)


def long_stream(kind: Kind, pictures: Pictures) -> dict[str, Any]:
    """Return a request of this kind for a long answer that nobody waits for."""
    body = {**kind.body(pictures), "stream": True, "ignore_eos": True}
    body["max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"] = 200
    return body


def asked(kind: Kind, pictures: Pictures, post: Callable[[Mapping[str, Any]], Answer], **more: Any) -> Answer:
    """Return the answer that `post` gets to a kind of request."""
    body = {**kind.body(pictures), **more}
    if kind.before is None:
        return post(body)
    earlier = post(kind.before(pictures)).identity
    body["diagnostics"] = {**body["diagnostics"], "compare_to": earlier}
    return post(body).naming(str(earlier))


def compiled_steps(folder: Path, dtype: str = "auto") -> list[str]:
    """Compile a model's steps, unless that was done in an earlier run; the names under which they lie in `KEPT`."""
    KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as many processes compile
    plainly = compiling._CHILD.replace("os.nice(19)", "os.nice(0)")  # behind other tests they would never end
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(compiling, "_CHILD", plainly)
        mllm = steering.load(folder, dtype=dtype, device="cpu")
        engine = steering.Engine(mllm, slots=2, self_check=False, compiled=True, compiled_folder=str(KEPT))
        assert engine.compilation.wait(COMPILING), "the steps cannot be compiled"
        steps = engine.compilation.steps
        assert isinstance(steps, CompiledSteps)
        assert len(steps) == len(VARIANTS)
        return [_digest(steps.wanted(variant).key) for variant in VARIANTS]
    finally:
        patch.undo()
        torch.set_num_threads(threads)


class Inside:
    """The same engine as a server's, with its steps compiled and other bounds, in this process."""

    def __init__(self, folder: Path, **bounds: int):
        mllm = steering.load(folder, device="cpu", name=NAME)
        self.engine = steering.Engine(
            mllm, slots=64, self_check=False, compiled=True, compiled_folder=str(KEPT), **bounds
        )
        assert self.engine.compilation.wait(COMPILING)
        self.engine.start()
        self._app = create_app(Settings(**settings_of(folder)), engine=self.engine)

    def answer(self, kind: Kind, pictures: Pictures, session: object, **more: Any) -> Answer:
        return asked(kind, pictures, partial(posted, self._app.test_client()), **more)

    def leave(self, kind: Kind, pictures: Pictures, session: object) -> int:
        """Start a stream and leave, like `Served.leave`."""
        response = self._app.test_client().post(CHAT, json=long_stream(kind, pictures))
        next(iter(response.response))
        response.close()
        return response.status_code

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()


class Withheld:
    """A folder of compiled steps that a server may use only one by one.

    A process that would compile a step waits until the test permits that one.
    """

    def __init__(self, folder: Path, names: list[str]):
        folder.mkdir(mode=0o700)
        self.folder = folder
        self._locks = {name: self._locked(name) for name in names}

    @property
    def names(self) -> list[str]:
        """The names of the steps that are still withheld."""
        return list(self._locks)

    def give(self, name: str) -> None:
        """Let a step be found."""
        place = self.folder / name
        shutil.copytree(KEPT / name, self.folder / f".{name}")
        os.rename(self.folder / f".{name}", place)
        os.close(self._locks.pop(name))

    def __enter__(self) -> Withheld:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._locks.values():
            os.close(descriptor)

    def _locked(self, name: str) -> int:
        """Take a lock as `Store.turn` of the compiling process does."""
        descriptor = os.open(self.folder / f".{name[:16]}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor


class Served(Server):
    """A server that is asked for kinds of requests. Any thread may ask."""

    replicas = 1

    def answer(self, kind: Kind, pictures: Pictures, session: requests.Session, **more: Any) -> Answer:
        def post(body: Mapping[str, Any]) -> Answer:
            response = session.post(self.url + CHAT, json=body, timeout=2 * PATIENCE)
            return Answer.of(response.status_code, response.text, response.headers["Content-Type"])

        return asked(kind, pictures, post, **more)

    def leave(self, kind: Kind, pictures: Pictures, session: requests.Session) -> int:
        """Ask for a long answer, and leave when it begins; its status."""
        body = long_stream(kind, pictures)
        with session.post(self.url + CHAT, json=body, timeout=2 * PATIENCE, stream=True) as response:
            next(response.iter_content(64))
            return response.status_code

    def metric(self, name: str) -> float:
        """Return a metric of the server; of several replicas the smallest value."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        values = [one.value for family in families for one in family.samples if one.name == f"helmsight_{name}"]
        return min(values) if len(values) >= self.replicas else 0.0

    def wait_until_compiled(self, steps: int, seconds: float = 2 * PATIENCE) -> None:
        """Wait until so many compiled steps are in use."""
        wait_for(lambda: self.metric("compiled_in_use") >= steps, seconds=seconds)

    def check_used(self, slots: int = 64) -> None:
        """Compiled steps, both caches and the engine's own process were in use, of as many slots as are the default."""
        for name in ("compiled_steps_total", "image_cache_hits_total", "prefix_cache_hits_total"):
            assert self.metric(name) > 0, name
        if self.replicas == 1:  # a replica has nobody else in its process, so that its engine needs none of its own
            assert self.metric("engine_resident_memory_bytes") > 0
        assert self.metric("slots") == slots
        assert self.metric("faults_total") == 0


@contextmanager
def serving(
    folder: Path, place: Path, compiled: Path, *arguments: str, replicas: int | None = None, **environ: str
) -> Iterator[Served]:
    """Start a server of the model in `folder`, and yield it once it is ready.

    Its log lies in `place`. It has the default settings, except for where files are written.
    """
    if replicas is not None:
        arguments += ("--replicas", str(replicas))
    where = settings_of(folder)
    command = [sys.executable, "-m", "server.cli", "serve", "--model", where["model"], "--name", NAME]
    command += ["--vectors", *where["vectors"], "--journal", str(place / "journal.db"), *arguments]
    switched = dict.fromkeys(("HELMSIGHT_COMPILED", "HELMSIGHT_JOURNAL", "OMP_NUM_THREADS"))  # by the suite, for others
    paths = os.pathsep.join([str(IMPATIENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {**switched, "HELMSIGHT_COMPILED_FOLDER": str(compiled), "PYTHONPATH": paths, **environ}
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets have room for short paths only
        server = Served(command, place / "log", anew=True, **told, RAY_TMPDIR=short)
        server.replicas = replicas or 1
        try:
            server.wait_until_ready(READY * server.replicas)
            wait_for(lambda: server.metric("ready") == 1, seconds=2 * PATIENCE)
            yield server
        finally:
            server.end()
