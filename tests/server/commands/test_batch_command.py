"""`helmsight batch` and `helmsight observe` against a server, and what is said of a wrong command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flask import Flask

from server.cli import main
from server.commands.batch import model_flags
from server.commands.options import settings_flags
from tests.server.batches.files import completion, read, request, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a file of requests."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [request("a"), request("b", max_tokens=-1), request("c", model="gpt-4o")])
    return tmp_path


def test_a_server_answers_a_batch(
    app: Flask, live: Callable[[Flask], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = live(app)
    assert main(["batch", "in.jsonl", "out.jsonl", "--base-url", url, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "1 answers, 2 failures: out.jsonl\n"
    assert captured.err.startswith("helmsight: 2 requests failed; the first one: 'max_tokens' must be")
    assert [row["response"]["status_code"] for row in read(folder / "out.jsonl")] == [200, 400, 404]
    words = ["batch", "in.jsonl", "out.jsonl", "--base-url", f"{url}/v1", "--quiet", "--any-model", "--replace"]
    assert main([*words, "--flat", "flat.csv"]) == 0
    assert capsys.readouterr().out == "1 answers, 0 failures, 2 kept from an earlier run: out.jsonl\n"
    assert len((folder / "flat.csv").read_text().splitlines()) == 4


def test_a_batch_without_any_answer_has_status_1(
    app: Flask, live: Callable[[Flask], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", ["{"])
    assert main(["batch", "in.jsonl", "out.jsonl", "--base-url", live(app), "--quiet"]) == 1
    assert "Line 1 is not valid JSON." in capsys.readouterr().err


def test_a_server_reads_answers(
    app: Flask, live: Callable[[Flask], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = completion("Hello there.").body
    write(folder / "answers.jsonl", [{"custom_id": "a", "request": body, "response": answer}])
    words = ["observe", "answers.jsonl", "--base-url", live(app), "--quiet", "--out", "read.jsonl"]
    assert main(words) == 0
    captured = capsys.readouterr().out.splitlines()
    assert captured[0].startswith("1 unmatched; ")
    assert captured[1].startswith("helmsight: the first answer that differs or was not read: a: 2 tokens were served")
    (row,) = read(folder / "read.jsonl")
    assert row["tokens"]["by"] == "count"
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("no answers; ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["batch", "none.jsonl", "o"], "none.jsonl: No such file"),
        (["batch", "in.jsonl", "in.jsonl"], "must be different ones"),
        (["batch", "in.jsonl", "o", "--flat", "t.xlsx"], "t.xlsx must end in .csv or .jsonl"),
        (["batch", "in.jsonl", "o", "--base-url", "http://127.0.0.1:9", "--dtype", "float16"], "no use for --dtype"),
        (["batch", "in.jsonl", "o", "--conditions", "in.jsonl"], "in.jsonl is not valid"),
        (["batch", "in.jsonl", "in.jsonl/o"], "in.jsonl is no folder"),
        (["observe", "in.jsonl", "--out", "in.jsonl/o"], "in.jsonl is no folder"),
        (["observe", "in.jsonl", "--state", "in.jsonl/o"], "in.jsonl is no folder"),
        (["observe", "none.jsonl"], "none.jsonl: No such file"),
        (["observe", "in.jsonl", "--map", "text=a"], "--map: NAME=PATH is needed"),
        (["observe", "in.jsonl", "--readouts", "fokus"], "unknown readout 'fokus'"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("server.batches.transport.load", loaded)
    assert main(words) == 1
    assert said in capsys.readouterr().err
    assert not (folder / "o").exists()


def test_only_settings_that_matter_without_a_port_are_flags() -> None:
    """The keys and the port of a server are none; limits and the journal are."""
    names = {flag.name for flag in model_flags()}
    assert {
        "model",
        "dtype",
        "device",
        "slots",
        "threads",
        "max_image_bytes",
        "journal",
        "allow_remote_images",
    } <= names
    assert not names & {"port", "host", "api_keys", "replicas", "graceful_timeout", "tensor_parallel", "engine_process"}
    assert names < {flag.name for flag in settings_flags()}
