"""The same chats in three dialects: the same tokens, the same numbers, the same rows of the journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.conftest import data_uri, user
from tests.server.dialects.speaking import BODIES, ask
from tests.server.journal.rows import rows_of
from tests.steering.parallel.asking import differences

SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["heart", "ring"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
SEEN = [user(data_uri(), "What colour is it?")]
RED, GREEN = (data_uri(Image.new("RGB", (84, 84), colour)) for colour in ((200, 9, 30), (9, 200, 30)))
TWO = [user(GREEN, RED, "Which picture is red?")]
TOLD = [
    {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": data_uri()}},
        {"type": "text", "text": "The star is blue.", "span": "context"},
        {"type": "text", "text": "What colour is the star?"},
    ]}
]  # fmt: skip
SYSTEM = [{"role": "system", "content": "Be brief."}, user("Why?")]
TURNS = [user(data_uri(), "What is it?"), {"role": "assistant", "content": "A star."}, user("Which colour?")]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["star", "ring"]}}, "required": ["at"]},
    },
}
CALLED = [
    user("Look at the star."),
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"star"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is red."},
]  # fmt: skip

CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": [user("Why?")]},
    "system": {"messages": SYSTEM},
    "picture": {"messages": SEEN},
    "two pictures": {"messages": TWO},
    "context": {"messages": TOLD},
    "turns": {"messages": TURNS},
    "seeded": {"messages": SEEN, "temperature": 1.3, "top_p": 0.9, "seed": 5},
    "likeliest few": {"messages": SYSTEM, "temperature": 1.0, "top_k": 3, "seed": 9, "repetition_penalty": 1.2},
    "cut": {"messages": SEEN, "max_tokens": 2, "ignore_eos": True},
    "stopped": {"messages": SEEN, "stop": [" with", " help"]},
    "scored": {"messages": SEEN, "logprobs": True, "top_logprobs": 2},
    "schema": {"messages": SEEN, "response_format": JSON, "max_tokens": 40},
    "toward vision": {"messages": TOLD, "steering": {"toward": "vision"}, "diagnostics": True},
    "toward text, beside a baseline": {"messages": TOLD, "steering": {"toward": "text"}, "baseline": True},
    "automatic": {"messages": TOLD, "steering": {"toward": "auto"}},
    "sage": {"messages": SEEN, "sage": True, "strict": False},
    "contrast": {"messages": SEEN, "contrast": {"kind": "vcd"}},
    "preset": {"messages": SEEN, "model": "helmsight-demo@text", "diagnostics": {"include": ["focus", "modality"]}},
    "readouts": {"messages": TWO, "diagnostics": {"include": ["focus", "patches", "decay", "residual"]}},
    "forced": {"messages": SEEN, "force": "The star is red.", "diagnostics": True},
    "ignored": {"messages": SEEN, "unheard_of": 1},
}
TOOLS: dict[str, dict[str, Any]] = {
    "may call": {"messages": [user("Look.")], "tools": [LOOK]},
    "must call": {"messages": [user("Look.")], "tools": [LOOK], "tool_choice": "required", "max_tokens": 60},
    "must call it": {
        "messages": [user("Look.")], "tools": [LOOK], "max_tokens": 60,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "was called": {"messages": CALLED, "tools": [LOOK]},
}  # fmt: skip
UNLIKE = ("id", "created", "latency", "request_id", "trace_id", "span_id")
"""Fields of rows that no two requests share."""


@pytest.fixture(scope="module")
def client(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    folder = tmp_path_factory.mktemp("journal")
    app = create_app(Settings(journal=str(folder / "journal.db"), journal_texts=True), engine=engine)
    yield app.test_client()
    app.extensions["helmsight"].journal.close()


@pytest.fixture(scope="module")
def calls(root: Path) -> Iterator[FlaskClient]:
    engine = steering.Engine(
        steering.load(calling(root), device="cpu"), slots=4, max_length=1024, self_check=False, threads=1
    )
    engine.start()
    yield create_app(Settings(), engine=engine).test_client()
    engine.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CHATS)
def test_all_dialects_get_the_same_answer_and_leave_the_same_row(client: FlaskClient, name: str, stream: bool) -> None:
    chat = {"model": "helmsight-demo", "max_tokens": 8, "temperature": 0, **CHATS[name]}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    before = len(client.get("/v1/diagnostics?limit=1000").json["data"])
    answers = {}
    for dialect, translate in BODIES.items():
        if (body := translate(chat)) is not None:
            answers[dialect] = ask(client, dialect, body | {"stream": stream} | (usage if dialect == "chat" else {}))
    expected = answers.pop("chat")
    assert expected.text
    assert answers
    for dialect, answer in answers.items():
        assert differences(asdict(expected), asdict(answer), dialect, 1e-5) == []
    rows = rows_of(client, before + 1 + len(answers))[: 1 + len(answers)]
    told = [{field: value for field, value in row.items() if field not in UNLIKE} for row in rows]
    for row in told[1:]:
        assert differences(told[0], row, tolerance=1e-5) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", TOOLS)
def test_all_dialects_make_the_same_calls(calls: FlaskClient, name: str, stream: bool) -> None:
    chat = {"max_tokens": 8, "temperature": 0, **TOOLS[name]}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    answers = {}
    for dialect, translate in BODIES.items():
        body = translate(chat)
        assert body is not None
        answers[dialect] = ask(calls, dialect, body | {"stream": stream} | (usage if dialect == "chat" else {}))
    assert answers["responses"] == answers["messages"] == answers["chat"]
    assert bool(answers["chat"].calls) == name.startswith("must")


def test_a_stop_string_is_named(client: FlaskClient) -> None:
    body = BODIES["messages"]({"model": "helmsight-demo", "max_tokens": 8, "temperature": 0, **CHATS["stopped"]})
    text = client.post("/v1/messages", json=body | {"stop_sequences": []}).json["content"][0]["text"]
    expected = next(stop for stop in (" help", " with") if stop in text)  # the first one that is complete
    answer = client.post("/v1/messages", json=body).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", expected)


def test_tokens_are_counted_without_an_answer(client: FlaskClient) -> None:
    for name in ("text", "system", "picture", "two pictures", "turns"):
        body = BODIES["messages"]({"model": "helmsight-demo", "max_tokens": 8, "temperature": 0, **CHATS[name]})
        assert body is not None
        answered = client.post("/v1/messages", json=body).json["usage"]
        del body["max_tokens"]
        counted = client.post("/v1/messages/count_tokens", json=body).json
        assert counted == {"input_tokens": answered["input_tokens"] + answered["cache_read_input_tokens"]}
