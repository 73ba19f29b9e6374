"""The same sixty requests in three dialects: the same tokens, the same numbers, the same rows of the journal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.dialects.kinds import BOTH, CHATS, ERRORS, LEFT, STREAMED, TOOLS, WHOLE
from tests.server.dialects.speaking import BODIES, ROUTES, STREAMS, Answered, ask, events
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import journal_of
from tests.steering.parallel.asking import differences

PLAIN = BOTH | WHOLE | STREAMED
SHOWN_AS = {
    "steering": "applied", "sage": "applied", "contrast": "applied", "diagnostics": "diagnostics",
    "baseline": "baseline", "guard": "guard", "prompt_logprobs": "prompt_logprobs", "unheard_of": "ignored",
}  # fmt: skip
"""Fields of an answer that a field of the request asks for."""
UNLIKE = ("id", "created", "latency", "request_id", "trace_id", "span_id")
"""Fields of rows that no two requests share."""


def served(engine: Any, folder: Path) -> Iterator[FlaskClient]:
    app = create_app(Settings(journal=str(folder / "journal.db"), journal_texts=True), engine=engine)
    yield app.test_client()
    app.extensions["helmsight"].journal.close()


@pytest.fixture(scope="module")
def client(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    yield from served(engine, tmp_path_factory.mktemp("journal"))


@pytest.fixture(scope="module")
def calls(reasoner: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    yield from served(reasoner, tmp_path_factory.mktemp("journal"))


def newest(client: FlaskClient, count: int) -> list[dict[str, Any]]:
    """Return the newest rows of the journal without what no two requests share."""
    journal_of(client).settle_all()
    rows = client.get(f"/v1/diagnostics?limit={count}").json["data"]
    assert len({row["id"] for row in rows}) == count
    return [{field: value for field, value in row.items() if field not in UNLIKE} for row in rows]


def asked_in_all(client: FlaskClient, chat: dict[str, Any]) -> Answered:
    """Return the answer to a chat, which all dialects give, and leave the same row of."""
    usage = {"stream_options": {"include_usage": True}} if chat["stream"] else {}
    answers = {
        dialect: ask(client, dialect, body | (usage if dialect == "chat" else {}))
        for dialect, translate in BODIES.items()
        if (body := translate({"max_tokens": 8, "temperature": 0, **chat})) is not None
    }
    expected = answers["chat"]
    assert len(answers) > 1
    for dialect, answer in answers.items():
        assert differences(asdict(expected), asdict(answer), dialect, 1e-5) == []
    first, *others = newest(client, len(answers))
    for row in others:
        assert differences(first, row, tolerance=1e-5) == []
    return expected


@pytest.mark.parametrize("name", CHATS)
def test_all_dialects_get_the_same_answer_and_leave_the_same_row(client: FlaskClient, name: str) -> None:
    answer = asked_in_all(client, {"model": "helmsight-demo", **CHATS[name]})
    assert answer.text
    assert {extra for field, extra in SHOWN_AS.items() if field in CHATS[name]} <= answer.extras.keys()


@pytest.mark.parametrize("name", TOOLS)
def test_all_dialects_make_the_same_calls_and_reason_alike(calls: FlaskClient, name: str) -> None:
    answer = asked_in_all(calls, TOOLS[name])
    assert bool(answer.calls) == name.startswith("must")
    assert bool(answer.reasoning) == name.startswith("reasons")


@pytest.mark.parametrize("name", ERRORS)
def test_all_dialects_refuse_alike(client: FlaskClient, name: str) -> None:
    chat, status, code = ERRORS[name]
    for dialect, translate in BODIES.items():
        body = translate({"model": "helmsight-demo", "max_tokens": 8, **chat})
        response = client.post(ROUTES[dialect], json=body)
        error = response.json["error"]
        assert (response.status_code, error["code"]) == (status, code), (dialect, error)
        assert error["param"].partition("[")[0].partition(".")[0] in body, (dialect, error)


@pytest.mark.parametrize("name", LEFT)
def test_a_client_that_leaves_leaves_the_same_row(name: str, tmp_path: Path) -> None:
    never = threading.Event()
    engine = FakeEngine(*["It ", "is ", "red."][: LEFT[name]], never)
    for client in served(engine, tmp_path):
        for dialect, translate in BODIES.items():
            body = translate({"messages": [{"role": "user", "content": "Which?"}], "max_tokens": 8, "stream": True})
            response = client.post(ROUTES[dialect], json=body)
            pieces = iter(response.response)
            if LEFT[name]:
                assert any(b"is " in piece for piece in pieces)
            else:
                next(pieces)
            response.close()
            assert engine.completions[-1].cancelled.is_set(), dialect
        first, *others = newest(client, 3)
        assert (first["finish_reason"], first["texts"]["answer"]) == ("cancelled", "It is " if LEFT[name] else "")
        assert others == [first, first]


def test_a_stop_string_is_named(client: FlaskClient) -> None:
    body = BODIES["messages"]({"model": "helmsight-demo", "max_tokens": 8, "temperature": 0, **BOTH["stopped"]})
    text = client.post("/v1/messages", json=body | {"stop_sequences": []}).json["content"][0]["text"]
    expected = next(stop for stop in (" help", " with") if stop in text)  # the first one that is complete
    answer = client.post("/v1/messages", json=body).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", expected)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_empty_answer_is_an_empty_text(stream: bool) -> None:
    client = create_app(Settings(), engine=FakeEngine("")).test_client()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": stream}
    response = client.post("/v1/messages", json=body, buffered=True)
    value = STREAMS["messages"](response.text) if stream else response.json
    assert value["content"] == [{"type": "text", "text": ""}]


def test_a_call_that_is_cut_is_an_empty_text(calls: FlaskClient) -> None:
    body = BODIES["messages"]({"temperature": 0, **TOOLS["a call that is cut, whole"]})
    message = calls.post("/v1/messages", json=body).json
    assert (message["stop_reason"], message["content"]) == ("max_tokens", [{"type": "text", "text": ""}])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_input_of_a_call_that_is_cut_has_what_is_complete(calls: FlaskClient, stream: bool) -> None:
    force = '<tool_call>\n{"name": "look", "arguments": {"at": "star", "deep": [1, 22'
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 200,
        "force": force,
        "stop_sequences": [" 22"],
    }
    body |= {"tools": [{"name": "look", "input_schema": {}}], "stream": stream}
    response = calls.post("/v1/messages", json=body, buffered=True)
    (block,) = (STREAMS["messages"](response.text) if stream else response.json)["content"]
    assert (block["name"], block["input"]) == ("look", {"at": "star", "deep": [1]})


def test_a_call_in_tags_is_the_same_streamed_wherever_it_is_cut(root: Path) -> None:
    model = steering.load(calling(root, "glm"), device="cpu")
    engine = steering.Engine(model, slots=2, self_check=False, threads=1)
    engine.start()
    client, inputs = create_app(Settings(), engine=engine).test_client(), list[Any]()
    for most in range(8, 24):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": most, "temperature": 0}
        body |= {"tools": [{"name": "f", "input_schema": {"required": ["a"]}}], "tool_choice": {"type": "any"}}
        whole = client.post("/v1/messages", json=body).json
        streamed = STREAMS["messages"](client.post("/v1/messages", json={**body, "stream": True}, buffered=True).text)
        inputs += [[block.get("input") for block in message["content"]] for message in (whole, streamed)]
    engine.stop()
    assert inputs[::2] == inputs[1::2]
    assert [{}] in inputs


def test_the_first_event_has_the_cached_tokens_that_the_last_one_has(engine: steering.Engine) -> None:
    keeping = steering.Engine(engine.mllm, slots=2, self_check=False, threads=1, prefix_cache_bytes=2**24)
    keeping.start()
    client = create_app(Settings(), engine=keeping).test_client()
    body = {"max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "red green blue " * 40}]}
    try:
        whole = client.post("/v1/messages", json=body).json["usage"]
        told = [*events(client.post("/v1/messages", json=body | {"stream": True}, buffered=True).text)]
    finally:
        keeping.stop()
    first, last = told[0]["message"]["usage"], told[-2]["usage"]
    assert first["cache_read_input_tokens"] > 0
    assert first | {"output_tokens": last["output_tokens"]} == last
    assert first["input_tokens"] + first["cache_read_input_tokens"] == whole["input_tokens"]


def test_tokens_are_counted_without_an_answer(client: FlaskClient) -> None:
    for name in ("text", "system", "picture", "two pictures", "turns"):
        body = BODIES["messages"]({"model": "helmsight-demo", "max_tokens": 8, "temperature": 0, **PLAIN[name]})
        assert body is not None
        answered = client.post("/v1/messages", json=body).json["usage"]
        del body["max_tokens"]
        counted = client.post("/v1/messages/count_tokens", json=body).json
        assert counted == {"input_tokens": answered["input_tokens"] + answered["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    "begun", ["The answer", [{"type": "text", "text": "The"}, {"type": "text", "text": " answer"}]]
)
def test_a_message_that_the_assistant_has_begun_is_continued(client: FlaskClient, begun: Any) -> None:
    turns = [{"role": "user", "content": "What can you see?"}, {"role": "assistant", "content": begun}]
    body = {"model": "helmsight-demo", "max_tokens": 8, "messages": turns}
    chat = {**body, "temperature": 0, "messages": [turns[0], {"role": "assistant", "content": "The answer"}]}
    continued, anew = (
        client.post("/v1/chat/completions", json={**chat, "continue_final_message": value}).json
        for value in (True, False)
    )
    counts = continued["usage"]["prompt_tokens"], anew["usage"]["prompt_tokens"]
    message = client.post("/v1/messages", json={**body, "temperature": 0}).json
    assert message["content"][0]["text"] == continued["choices"][0]["message"]["content"]
    assert message["usage"]["input_tokens"] == counts[0] != counts[1]
    assert client.post("/v1/messages/count_tokens", json={**body}).json["input_tokens"] == counts[0]
    restarted = client.post("/v1/messages", json={**body, "continue_final_message": False}).json
    assert restarted["usage"]["input_tokens"] == counts[1]
