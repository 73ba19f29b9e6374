"""A server on a random model: its start time, and its throughput over HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import requests
import torch

from steering.bench.asking import noise, words
from steering.bench.load.callers import ask_all
from steering.bench.load.serving import TEXT, RequestKind, kinds, rows_of
from steering.bench.rows import Gauge, Unavailable
from steering.bench.shapes import PATCH, write_checkpoint
from steering.bench.trial import Trial

MEMORY = Path("/dev/shm")
"""The folder for a checkpoint, where it exists: otherwise a disk would be measured."""
_POLL = 0.05
_TIMEOUT = 300.0


def start(trial: Trial) -> Iterator[Gauge]:
    """Measure seconds until the port is open and until the server is ready, at the first start and at the second.

    Reading the weights is timed beside them; then callers send requests over HTTP.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as written:
        folder = Path(written)
        begun = time.perf_counter()
        write_checkpoint(trial.size, trial.place, getattr(torch, trial.dtype), folder)
        yield Gauge("start", "making and writing the checkpoint", time.perf_counter() - begun, "s")
        yield Gauge("start", "reading its weights alone", _read_weights(folder), "s")
        for number in ("first", "second")[: 1 if trial.quick else None]:
            with _serve(trial, folder) as server:
                yield Gauge("start", f"{number} start until the port is open", server.opened, "s")
                yield Gauge("start", f"{number} start until it is ready", server.ready, "s")
                if trial.quick or number == "second":
                    yield from _over_http(trial, server.url)


def _over_http(trial: Trial, url: str) -> Iterator[Gauge]:
    for kind in kinds():
        for callers in trial.size.callers:
            bodies = [_body(trial, kind) for _ in range(callers + max(4, 2 * callers))]
            ask_all(lambda body: _pieces(url, body), bodies[:callers], callers)
            times = ask_all(lambda body: _pieces(url, body), bodies[callers:], callers)
            yield from rows_of("start", f"over HTTP, {kind.name}, {callers} callers", times, trial.size.answer)


def _body(trial: Trial, kind: RequestKind) -> bytes:
    """Return a streaming request with a new picture."""
    file = io.BytesIO()
    noise((PATCH * trial.size.picture[0], PATCH * trial.size.picture[1])).save(file, "PNG")
    picture = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": words(random.Random(), TEXT)}
    content = [{"type": "image_url", "image_url": {"url": picture}}, text]
    tokens = trial.size.answer
    chosen = {"temperature": 0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": True}
    return json.dumps({"messages": [{"role": "user", "content": content}], **chosen, **kind.fields}).encode()


def _pieces(url: str, body: bytes) -> Iterator[str]:
    """Yield the pieces of text of an answer as they come."""
    headers = {"Content-Type": "application/json"}
    with requests.post(f"{url}/v1/chat/completions", body, headers=headers, stream=True, timeout=_TIMEOUT) as response:
        if response.status_code != 200:
            raise Unavailable(f"the server answered {response.status_code}: {response.text[:200]}")
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and (text := choices[0]["delta"].get("content")):
                    yield text


class _Server:
    """A started server: its address, and the seconds until its port was open and until it was ready."""

    def __init__(self, url: str, opened: float, ready: float):
        self.url, self.opened, self.ready = url, opened, ready


@contextmanager
def _serve(trial: Trial, folder: Path) -> Iterator[_Server]:
    """Start the server as a user does, but on a free port and without a journal, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--device", trial.device, "--dtype", trial.dtype, "--slots", str(max(trial.size.callers))]
    command += ["--max-length", str(trial.size.length), "--journal", "off"]
    with (folder / "server.log").open("w") as log:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            opened = _until(process, log.name, lambda: _is_open(port)) - begun
            url = f"http://127.0.0.1:{port}"
            ready = _until(process, log.name, lambda: requests.get(f"{url}/ready", timeout=5).ok) - begun
            yield _Server(url, opened, ready)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server with all of its processes."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, number)
            process.wait(patience)


def _until(process: subprocess.Popen[bytes], log: str, is_ready: Callable[[], bool]) -> float:
    """Wait until a condition holds, and return that time; raise Unavailable where the server ended before."""
    until = time.perf_counter() + _TIMEOUT
    while time.perf_counter() < until:
        if process.poll() is not None:
            break
        try:
            if is_ready():
                return time.perf_counter()
        except requests.ConnectionError:
            pass
        time.sleep(_POLL)
    raise Unavailable(f"the server did not start: {Path(log).read_text()[-300:]}")


def _is_open(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


def _read_weights(folder: Path) -> float:
    """Return the seconds of reading all weights into memory, which is discarded."""
    begun = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**26):
                pass
    return time.perf_counter() - begun
