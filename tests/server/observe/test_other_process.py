"""Answers of a server in another process, exported without its readouts, read here with the numbers that it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import requests
from flask import Flask

from server.batches.transport import LocalTransport
from server.observe.run import ObserveOptions, observe
from tests.server.batches.files import read, write
from tests.server.observe.exports import KINDS, READOUTS, exported, same
from tests.server.process.servers import Server

SERVE = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--slots", "4", "--no-compiled"]


@pytest.mark.slow
def test_numbers_of_another_process_are_those_that_are_read_here(app: Flask, tmp_path: Path) -> None:
    server = Server(SERVE, tmp_path / "log", HOME=str(tmp_path), HELMSIGHT_JOURNAL="off").wait_until_ready()
    lines, live = [], {}
    try:
        for name, fields in KINDS.items():
            body = {"temperature": 0, "max_tokens": 24, **fields}
            asked = {**body, "diagnostics": {"include": list(READOUTS)}, "logprobs": True}
            answer = requests.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).json()
            lines.append({**exported(name, answer, logprobs=True), "request": body})
            live[name] = answer["choices"]
    finally:
        server.end()
    write(tmp_path / "answers.jsonl", lines)
    options = ObserveOptions(
        tmp_path / "answers.jsonl", readouts=READOUTS, at_once=1, out=tmp_path / "out.jsonl", quiet=True
    )
    report = observe(options, LocalTransport(app, "observe"))
    assert report.prompts == 0
    rows = [row for row in read(tmp_path / "out.jsonl") if row["outcome"] == "read"]
    assert len(rows) >= len(KINDS) - 1, report.reason
    numbers = sum(same(row["diagnostics"], live[row["custom_id"]][row["choice"]]["diagnostics"]) for row in rows)
    assert numbers > 1000
