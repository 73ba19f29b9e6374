"""docs/observe.md, followed on files of the form that vLLM writes, and its commands as a user calls them."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from server import cli
from server.app import create_app
from server.batches.file import URL
from server.batches.transport import LocalTransport
from server.observe import run as running
from server.settings import Settings
from tests.first_hour.pages import ROOT, blocks, commands
from tests.server.batches.files import read, write
from tests.server.batches.home import at_home
from tests.server.observe.exports import exported, live, same
from tests.waiting import PATIENCE

PAGE = ROOT / "docs" / "observe.md"


@pytest.fixture
def files(app: Flask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Write the files of the page into a home, and return the live answers behind them."""
    at_home(tmp_path, monkeypatch)
    bodies, answers = live(LocalTransport(app))
    lines = [{"custom_id": name, "method": "POST", "url": URL, "body": body} for name, body in bodies.items()]
    write(tmp_path / "requests.jsonl", lines)
    write(tmp_path / "answers.jsonl", [exported(name, answer) for name, answer in answers.items()])
    traces = [
        {"trace": name, "input": {"chat": json.dumps(body["messages"])}, "output": [{"text": text_of(answers[name])}]}
        for name, body in bodies.items()
    ]
    write(tmp_path / "traces.jsonl", traces)
    return answers


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_the_commands_of_the_page_read_what_they_say(
    files: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, program, traced, _, follow = blocks(PAGE)
    assert [one.language for one in (first, program, traced, follow)] == ["sh", "python", "sh", "text"]
    for block in (first, traced):
        (command,) = commands(block.text)
        assert cli.main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert "prompts of another length" in said
    readings = read(tmp_path / "readings.jsonl")
    assert len(readings) == len(files) + 2
    for one in readings:
        if one["outcome"] == "read":
            theirs = files[one["custom_id"]]["choices"][one["choice"]]["diagnostics"]
            for name in ("focus", "modality", "decay"):
                same(one["diagnostics"][name], theirs[name], name, 1e-5)
    assert cli.main(["journal", "export"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["metadata"]["observed"] for row in rows) == sorted(one["custom_id"] for one in readings)
    by_id = {row["custom_id"]: row for row in read(tmp_path / "traced.jsonl")}
    assert set(by_id) == set(files)
    assert {row["tokens"]["by"] for row in by_id.values()} == {None}
    exec(compile(program.text, str(PAGE), "exec"), {"__name__": "__main__"})
    assert "answers," in capsys.readouterr().out


def test_stored_completions_are_read(
    engine: steering.Engine, live: Callable[[Flask], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's program writes them with OpenAI's SDK; the numbers are those of the answers when they were stored."""
    at_home(tmp_path, monkeypatch)
    app = create_app(Settings(journal=str(tmp_path / "journal.db"), slots=4), engine=engine)
    transport = LocalTransport(app, "live")
    parts = [{"type": "text", "text": "Text context: It is blue."}, {"type": "text", "text": "What colour is it?"}]
    chats = [[{"role": "user", "content": "Say something."}], [{"role": "user", "content": parts}]]
    asked = {"store": True, "temperature": 0, "max_tokens": 12, "diagnostics": {"include": ["residual"]}}
    answers = [transport.send({"messages": messages, **asked}).body for messages in chats]
    (program,) = [one for one in blocks(PAGE) if one.language == "python" and "OpenAI(" in one.text]
    url = live(app).removeprefix("http://")
    exec(compile(program.text.replace("localhost:8000", url), str(PAGE), "exec"), {"__name__": "__main__"})
    app.extensions["helmsight"].journal.close()
    options = running.ObserveOptions(tmp_path / "stored.jsonl", readouts=("residual",), out=tmp_path / "o", quiet=True)
    report = running.observe(options, transport)
    assert report.outcomes == {"read": 2}, report.reason
    rows = {row["custom_id"]: row for row in read(tmp_path / "o")}
    for answer in answers:
        row = rows[answer["id"]]
        assert row["same_prompt"]
        same(row["diagnostics"], answer["choices"][0]["diagnostics"], within=1e-5)


def test_the_follower_of_the_page_ends_with_sigterm_and_keeps_its_place(
    files: dict[str, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its options are those of the page, with files of this folder."""
    (command,) = commands(blocks(PAGE)[-1].text)
    words = shlex.split(command.replace("/var/log/engine", str(tmp_path)).replace("/var/lib/helmsight", str(tmp_path)))[
        1:
    ]
    words[words.index("--metrics-port") + 1] = "0"
    words += ["--share", "1", "--rate", "1000", "--threads", "1", "--requests", "requests.jsonl", "--out", "o.jsonl"]
    kept = running.Observing._keep

    def counted(self: Any, rows: Any) -> None:
        kept(self, rows)
        if sum(self.report.outcomes.values()) == len(files) + 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(running.Observing, "_keep", counted)
    before = signal.getsignal(signal.SIGTERM)
    watchdog = threading.Timer(PATIENCE, signal.raise_signal, [signal.SIGALRM])
    watchdog.start()
    assert cli.main(words) == 0
    watchdog.cancel()
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(read(tmp_path / "o.jsonl")) == len(files) + 2
    place = json.loads((tmp_path / "answers.jsonl.observed").read_text())
    assert place["end"] == (tmp_path / "answers.jsonl").stat().st_size
    assert (tmp_path / "journal.db").exists()
    capsys.readouterr()
