"""Callers in a closed loop, through an engine and over HTTP, and what a server's start is measured by."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.bench.load import start
from steering.bench.load.callers import ask_all
from steering.bench.load.serving import kinds
from steering.bench.rows import Gauge, Unavailable
from steering.bench.sections import rows_of
from steering.bench.shapes import SHAPES, write_checkpoint
from steering.bench.trial import Trial
from tests.waiting import PATIENCE

TINY = Trial("tiny", "cpu", "float32", quick=True)


def values(rows: list[Gauge], label: str) -> list[float]:
    return [row.value for row in rows if row.what.startswith(label) and isinstance(row.value, float)]


def test_callers_ask_at_once_and_each_one_after_the_other() -> None:
    running, most, asked, lock, together = 0, 0, 0, threading.Lock(), threading.Barrier(3)

    def ask(pieces: int) -> Iterator[int]:
        nonlocal running, most, asked
        with lock:
            running, asked = running + 1, asked + 1
            most = max(most, running)
            is_among_first = asked <= 3
        if is_among_first:
            together.wait(PATIENCE)
        time.sleep(0.02)
        for piece in range(pieces):
            yield piece
            time.sleep(0.01)
        with lock:
            running -= 1

    times = ask_all(ask, [3] * 7, callers=3)
    assert most == 3
    assert (len(times.first), len(times.gaps)) == (7, 14)
    assert 0.02 <= times.median_first < times.whole
    assert times.whole >= 3 * 0.04
    assert 0.01 <= times.long_gap == max(times.gaps)


def test_an_error_of_a_caller_is_raised() -> None:
    def ask(work: str) -> Iterator[str]:
        if work == "bad":
            raise RuntimeError("refused")
        yield work

    with pytest.raises(RuntimeError, match="refused"):
        ask_all(ask, ["a", "bad", "c"], callers=2)
    with pytest.raises(ValueError, match="no text"):
        ask_all(lambda work: [], ["a"], callers=1)


def test_throughput_is_compared_with_what_plain_steps_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "model", functools.cache(Trial.model))
    rows = list(rows_of("serving", TINY))
    assert "failed" not in [row.what for row in rows], rows
    for kind in kinds():
        for callers in TINY.size.callers:
            figures = values(rows, f"{kind.name}, {callers} callers")
            assert len(figures) == 4
            assert min(figures) > 0


class Answering(BaseHTTPRequestHandler):
    """Streams as many pieces as tokens were asked for, and keeps the bodies."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "red"}}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        pass


def test_bodies_over_http_ask_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "bodies", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rows = list(start._over_http(TINY, f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert len(rows) == 3 * len(kinds()) * len(TINY.size.callers)
    assert all(isinstance(row.value, float) and row.value > 0 for row in rows)
    fields = [{name for name in body if name in ("steering", "sage", "diagnostics")} for body in Answering.bodies]
    assert {frozenset(kind_fields) for kind_fields in fields} == {frozenset(kind.fields) for kind in kinds()}
    pictures = [body["messages"][0]["content"][0]["image_url"]["url"] for body in Answering.bodies]
    assert len(set(pictures)) == len(pictures), "a new picture each"


def test_the_checkpoint_that_is_written_is_served_with_its_vector(tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], torch.device("cpu"), torch.float32, tmp_path)
    mllm = steering.load(tmp_path, device="cpu")
    vector = steering.VectorStore(tmp_path / "vectors").get("modality-preference")
    assert vector.fingerprint == mllm.fingerprint
    assert start._read_weights(tmp_path) > 0


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="did not start"), start._serve(TINY, tmp_path):
        pass


@pytest.mark.long
def test_a_server_is_started_and_asked() -> None:
    rows = list(rows_of("start", TINY))
    assert "failed" not in [row.what for row in rows], rows
    (opened,), (ready,) = values(rows, "first start until the port"), values(rows, "first start until it is ready")
    assert 0 < opened <= ready
    assert all(min(values(rows, f"over HTTP, {kind.name}")) > 0 for kind in kinds())
