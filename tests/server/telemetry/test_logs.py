"""Each event is one line, whatever clients send; a request's lines have its id, and nothing of its text."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from server.app import create_app
from server.settings import Settings
from server.telemetry.logs import OneLine, OneObject, current, current_completion, printable
from tests.server.conftest import user
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE


@pytest.mark.parametrize("text", ["a\r\nFAKE", "a\x1b[31m", "a\x85b", "a\u2028b", "a\x00b", "a\u202eb", "a\x7fb"])
def test_what_is_not_printable_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.isascii()
    assert shown.encode().decode("unicode_escape") == text


def test_printable_text_stays_and_no_escape_can_be_faked() -> None:
    assert printable("grün, 日本 \"'") == "grün, 日本 \"'"
    assert printable("\\n") != printable("\n")


def test_a_traceback_that_quotes_a_client_begins_no_line() -> None:
    try:
        raise ValueError("x\n[2026] [INFO] fake")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed: %s", ("a\nb",), sys.exc_info())
    first, *others = OneLine("%(message)s").format(record).split("\n")
    assert first == "failed: a\\nb"
    assert all(line.startswith("    ") for line in others)


@pytest.fixture(autouse=True)
def no_request() -> None:
    """Answers that tests before did not take to their end leave their request current."""
    current.set(None)


NASTY = "a\nb\r\x1b[31m\x85\u2028\x7f\u202e"


def record(message: str, *args: Any, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("helmsight", logging.ERROR, "f", 1, message, args, more.pop("exc_info", None))
    made.__dict__.update(more)
    return made


def test_a_json_line_is_one_line_and_says_what_was_logged() -> None:
    try:
        raise ValueError(NASTY)
    except ValueError:
        line = OneObject().format(record("failed: %s", NASTY, exc_info=sys.exc_info(), fields={"status": 500}))
    assert line.isascii()
    assert line.isprintable()
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("error", "helmsight", f"failed: {NASTY}")
    assert said["status"] == 500
    assert said["exception"].endswith(f"ValueError: {NASTY}")
    assert "request_id" not in said


def test_lines_of_a_request_have_its_id_in_both_forms() -> None:
    token = current.set("req_1")
    try:
        assert OneLine("%(message)s").format(record("failed")) == "failed (req_1)"
        assert json.loads(OneObject().format(record("failed")))["request_id"] == "req_1"
        answering = current_completion.set(("req_1", "chatcmpl-1"))
        try:
            assert OneLine("%(message)s").format(record("failed")) == "failed (req_1 chatcmpl-1)"
            assert json.loads(OneObject().format(record("failed")))["completion_id"] == "chatcmpl-1"
        finally:
            current_completion.reset(answering)
    finally:
        current.reset(token)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123:4/x=", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False), ("grün", False)],
)
def test_a_well_formed_request_id_is_taken_over(fake: FakeEngine, given: str, kept: bool) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    back = client.get("/health", headers={"X-Request-ID": given}).headers["X-Request-Id"]
    assert (back == given) is kept
    assert kept or back.startswith("req_")


def await_lines(log: Path, number: int) -> None:
    """Wait for a log's lines: each is written behind its answer's last byte, so two requests' may change places."""
    deadline = time.monotonic() + PATIENCE
    while log.read_text().count("\n") < number:
        assert time.monotonic() < deadline, f"{number} lines are expected, there are {log.read_text()!r}"
        time.sleep(0.01)


def test_a_finished_request_is_an_object_without_content_or_key(
    fake: FakeEngine, serve_worker: Callable[..., int], tmp_path: Path
) -> None:
    log, secret = tmp_path / "access.log", "sk-secret-key"
    app = create_app(Settings(log_format="json", api_keys=(secret,)), engine=fake)  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{serve_worker(app, accesslog=str(log))}"
    body = {"messages": [user("what only the client knows")], "max_tokens": 8}
    head = {"Authorization": f"Bearer {secret}", "X-Request-ID": "mine"}
    chat = "/v1/chat/completions"
    answered = requests.post(f"{url}{chat}?api_key={secret}", json=body, headers=head, timeout=PATIENCE)
    await_lines(log, 1)
    streamed = requests.post(f"{url}{chat}", json=body | {"stream": True}, headers=head, timeout=PATIENCE)
    await_lines(log, 2)
    refused = requests.post(f"{url}{chat}", json=body, timeout=PATIENCE)
    await_lines(log, 3)
    assert (answered.status_code, streamed.status_code, refused.status_code) == (200, 200, 401)
    text = log.read_text()
    assert secret not in text
    assert "client knows" not in text
    first, second, third = (json.loads(line) for line in text.splitlines())
    fields = {"event": "request", "route": chat, "path": chat, "method": "POST", "client": "127.0.0.1"}
    tokens = {"prompt_tokens": 3, "completion_tokens": 2}  # what the fake engine says of its script of two pieces
    assert first.items() >= {**fields, **tokens, "status": 200, "request_id": "mine"}.items()
    assert (first["bytes"], first["seconds"] > 0) == (len(answered.content), True)
    assert second.items() >= {**fields, **tokens}.items()
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    shown = json.loads(page.partition("```json\n")[2].partition("\n")[0])
    assert list(shown) == [name for name in second if name != "key_name"], (
        "the pages show a line as it is, without a key"
    )
    assert third.items() >= {**fields, "status": 401, "error": "missing_api_key"}.items()
    assert third["request_id"] == refused.headers["X-Request-Id"]
    assert "prompt_tokens" not in third
    assert (first["completion_id"], "completion_id" in third) == (answered.json()["id"], False)


def test_a_line_of_text_has_both_ids(fake: FakeEngine, serve_worker: Callable[..., int], tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    url = f"http://127.0.0.1:{serve_worker(create_app(Settings(), engine=fake), accesslog=str(log))}"  # type: ignore[arg-type]
    chat = {"messages": [user("hi")], "max_tokens": 8}
    answered = requests.post(
        f"{url}/v1/chat/completions", json=chat, headers={"X-Request-ID": "mine"}, timeout=PATIENCE
    )
    await_lines(log, 1)
    requests.get(f"{url}/health", headers={"X-Request-ID": "other"}, timeout=PATIENCE)
    await_lines(log, 2)
    first, second = log.read_text().splitlines()
    assert first.split()[-2:] == ["mine", answered.json()["id"]]
    assert second.split()[-2:] == ["other", "-"]
