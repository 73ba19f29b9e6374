"""Reasoning between a model's own tags is told apart from the answer, counted, and given back to its template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.dialects.reasoning import ReasoningStream
from server.settings import Settings
from tests.families.calling import calling
from tests.server.dialects.speaking import BODIES, READERS, ROUTES, STREAMS, ask, events
from tests.server.fakes import FakeEngine

MARKERS = ("<think>", "</think>")


def divided(pieces: list[str], prompt_end: str = "", markers: Any = MARKERS) -> list[tuple[str, str]]:
    """Return the parts of an answer that comes in pieces, neighbours of one kind joined."""
    stream = ReasoningStream(markers, prompt_end)
    parts = [part for piece in pieces for part in stream.feed(piece)]
    parts += stream.feed("", last=True)
    return [
        (kind, "".join(text for _, text in group)) for kind, group in itertools.groupby(parts, key=lambda part: part[0])
    ]


@pytest.mark.parametrize(
    ("text", "prompt_end", "expected"),
    [
        ("Red.", "", [("text", "Red.")]),
        ("<think>Hm.</think>\n\nRed.", "", [("reasoning", "Hm."), ("text", "Red.")]),
        ("\n<think>Hm.</think>Red.", "", [("reasoning", "Hm."), ("text", "Red.")]),
        ("Hm.</think>\nRed.", "assistant\n<think>\n", [("reasoning", "Hm."), ("text", "Red.")]),
        ("<think>Hm. </thin", "", [("reasoning", "Hm. </thin")]),
        ("Hm", "<think>", [("reasoning", "Hm")]),
        ("<thi", "", [("text", "<thi")]),
        ("Red <think>no</think>", "", [("text", "Red <think>no</think>")]),
        ("<think></think>Red.", "", [("text", "Red.")]),
        ("<think>a</think>b</think>c", "", [("reasoning", "a"), ("text", "b</think>c")]),
    ],
)
def test_any_cut_gives_the_same_parts(text: str, prompt_end: str, expected: list[tuple[str, str]]) -> None:
    assert divided([text], prompt_end) == expected
    assert divided([*text], prompt_end) == expected
    for cut in range(1, len(text)):
        assert divided([text[:cut], text[cut:]], prompt_end) == expected


def test_without_tags_all_is_text() -> None:
    assert divided(["<think>a</think>", "b"], markers=None) == [("text", "<think>a</think>b")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_is_an_item_and_a_block_of_its_own(stream: bool) -> None:
    engine = FakeEngine("<thi", "nk>Look", " here.</th", "ink>\n\nIt is", " red.")
    engine.can(reasoning=MARKERS)
    client = create_app(Settings(), engine=engine).test_client()
    response = client.post("/v1/responses", json={"input": "Which?", "stream": stream}, buffered=True)
    value = [*events(response.text)][-1]["response"] if stream else response.json
    thought, message = value["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Look here."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "It is red.")

    turns = [{"role": "user", "content": "Which?"}]
    response = client.post("/v1/messages", json={"messages": turns, "max_tokens": 9, "stream": stream}, buffered=True)
    if not stream:
        assert response.json["content"] == [
            {"type": "thinking", "thinking": "Look here.", "signature": ""},
            {"type": "text", "text": "It is red."},
        ]
        return
    told = [*events(response.text)]
    begun = [value["content_block"]["type"] for value in told if value["type"] == "content_block_start"]
    deltas = [value["delta"] for value in told if value["type"] == "content_block_delta"]
    assert begun == ["thinking", "text"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Look here."
    assert "".join(delta.get("text", "") for delta in deltas) == "It is red."
    assert [value["index"] for value in told if value["type"] == "content_block_stop"] == [0, 1]


@pytest.fixture(scope="module")
def opened(root: Path) -> Iterator[FlaskClient]:
    """Yield a client of a model whose template opens the first tag, as that of Qwen3-VL-Thinking."""
    model = steering.load(calling(root), device="cpu")
    begins = "<|im_start|>assistant\\n"
    assert model.template.rindex(begins) > len(model.template) - 50
    model.processor.chat_template = (
        "{{- '<think>\\n</think>' if messages[0].reasoning_content }}"
        + f"{begins}<think>\\n".join(model.template.rsplit(begins, 1))
    )
    engine = steering.Engine(model, slots=4, max_length=1024, self_check=False, threads=1)
    engine.start()
    yield create_app(Settings(), engine=engine).test_client()
    engine.stop()


def test_what_follows_a_format_or_must_call_is_no_reasoning(opened: FlaskClient) -> None:
    """Nothing in a format can close the tag that the template has opened."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for dialect in ("responses", "messages"):
        for fields, kind in (
            ({"response_format": form}, "text"),
            ({"tools": tools, "tool_choice": "required"}, "call"),
            ({"max_tokens": 4}, "reasoning"),
        ):
            body = BODIES[dialect]({"messages": [ASKED], "max_tokens": 200, "temperature": 0, **fields})
            value = opened.post(ROUTES[dialect], json=body).json
            found = value["output"] if dialect == "responses" else value["content"]
            words = {
                "reasoning": ("reasoning", "thinking"),
                "text": ("message", "text"),
                "call": ("function_call", "tool_use"),
            }
            assert {block["type"] for block in found} <= {*words[kind]}, (dialect, kind)
            if dialect == "responses":
                reasoned = value["usage"]["output_tokens_details"]["reasoning_tokens"]
                assert (reasoned > 0) == (kind == "reasoning")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", BODIES)
@pytest.mark.parametrize("behind", ["", "</think>\n\nRed.", "</think>\n\n{call}"], ids=["cut", "text", "call"])
def test_a_call_within_the_reasoning_is_reasoning(opened: FlaskClient, dialect: str, behind: str, stream: bool) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    thought, force = f"I may {call}, or not. ", behind.format(call=call)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = BODIES[dialect]({"messages": [ASKED], "max_tokens": 200, "force": thought + force, "tools": tools})
    body = {**(body or {}), "stream": stream}
    if stream and dialect == "chat":
        body["stream_options"] = {"include_usage": True}
    response = opened.post(ROUTES[dialect], json=body, buffered=True)
    answer = READERS[dialect](STREAMS[dialect](response.text) if stream else response.json)
    assert answer.calls == ([("f", {})] if "call" in behind else [])
    text = "Red." if "Red." in behind else ""
    if dialect == "chat":
        assert answer.text == thought + ("</think>" if behind else "") + (f"\n\n{text}" if text else "")
    else:
        assert (answer.reasoning, answer.text) == (thought, text)


# --- a model whose template has a place for reasoning --------------------------------------------------------------------

ASKED = {"role": "user", "content": "Which colour?"}
REASONED = {"role": "assistant", "content": "Red.", "reasoning_content": "The star looks red."}
AGAIN = {"role": "user", "content": "Sure?"}


@pytest.fixture(scope="module")
def client(reasoner: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    journal = str(tmp_path_factory.mktemp("journal") / "journal.db")
    app = create_app(Settings(journal=journal), engine=reasoner)
    yield app.test_client()
    app.extensions["helmsight"].journal.close()


def prompt_tokens(engine: steering.Engine, *chat: Any) -> int:
    """Return the length of a prompt as transformers renders it."""
    processor = engine.mllm.processor
    text = processor.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
    assert text.count("<think>\nThe star looks red.\n</think>\n\nRed.") == sum("reasoning_content" in m for m in chat)
    return len(processor.tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("dialect", BODIES)
def test_reasoning_goes_back_to_its_place_in_the_template(
    client: FlaskClient, reasoner: steering.Engine, dialect: str
) -> None:
    body = BODIES[dialect]({"messages": [ASKED, REASONED, AGAIN], "max_tokens": 2, "temperature": 0})
    assert body is not None
    assert ask(client, dialect, body).tokens[0] == prompt_tokens(reasoner, ASKED, REASONED, AGAIN)
    assert prompt_tokens(reasoner, ASKED, REASONED, AGAIN) > prompt_tokens(
        reasoner, ASKED, {"role": "assistant", "content": "Red."}, AGAIN
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>It looks red.</think>\n\nIt is red.", "<think>It looks red.</think>"),
        ("<think>It looks red", "<think>It looks red"), ("It is red.", ""), ("It </think>is red.", ""),
    ],
)  # fmt: skip
def test_tokens_of_reasoning_are_counted(
    client: FlaskClient, reasoner: steering.Engine, text: str, reasoning: str, stream: bool
) -> None:
    body = {"input": "Which?", "force": text, "stream": stream, "temperature": 0}
    response = client.post("/v1/responses", json=body, buffered=True)
    value = [*events(response.text)][-1]["response"] if stream else response.json
    offsets = reasoner.mllm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert value["usage"]["output_tokens"] == len(offsets) + 1, "and the end"
    expected = sum(start < len(reasoning) for start, _ in offsets)
    if reasoning == text:
        expected += 1
    assert value["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}


def test_a_chain_reasons_on(client: FlaskClient, reasoner: steering.Engine) -> None:
    force = "<think>The star looks red.</think>\n\nRed."
    first = client.post("/v1/responses", json={"input": "Which colour?", "store": True, "force": force}).json
    assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
    body = {"input": "Sure?", "previous_response_id": first["id"], "max_output_tokens": 2, "store": True}
    second = client.post("/v1/responses", json=body).json
    assert second["usage"]["input_tokens"] == prompt_tokens(reasoner, ASKED, REASONED, AGAIN)
    items = client.get(f"/v1/responses/{second['id']}/input_items?order=asc").json["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message", "message"]
    assert items[1]["content"] == [{"type": "reasoning_text", "text": "The star looks red."}]


def test_reasoning_without_a_place_is_ignored_by_name() -> None:
    engine = FakeEngine()
    client = create_app(Settings(), engine=engine).test_client()
    chat = {"messages": [{"role": "system", "content": "Be brief."}, ASKED, REASONED, AGAIN], "max_tokens": 2}
    for dialect, place in (
        ("chat", "messages[2].reasoning_content"), ("responses", "input[1]"), ("messages", "messages[1].content[0]"),
    ):  # fmt: skip
        body = BODIES[dialect](chat)
        assert body is not None
        assert ask(client, dialect, body).extras["ignored"] == [place]
        assert "reasoning_content" not in engine.requests[-1].messages[2]
        refused = client.post(ROUTES[dialect], json=body | {"strict": True})
        assert (refused.status_code, refused.json["error"]["param"]) == (400, place)
    engine.can(takes_reasoning=True)
    for dialect in BODIES:
        body = BODIES[dialect](chat)
        assert body is not None
        assert "ignored" not in ask(client, dialect, body).extras
        assert engine.requests[-1].messages[2]["reasoning_content"] == REASONED["reasoning_content"]


def test_reasoning_that_nothing_follows_or_that_is_encrypted_is_ignored_by_name() -> None:
    engine = FakeEngine()
    engine.can(takes_reasoning=True)
    client = create_app(Settings(), engine=engine).test_client()
    thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Short."}]}
    items = [
        ASKED, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, thought,
        {"role": "assistant", "content": "Red."}, thought, AGAIN,
    ]  # fmt: skip
    assert client.post("/v1/responses", json={"input": items}).json["ignored"] == ["input[1]", "input[4]"]
    assert engine.requests[-1].messages[1] == {**REASONED, "reasoning_content": "Short."}
    for message in ({"role": "user", "content": "a", "reasoning_content": "b"}, {**REASONED, "reasoning_content": 5}):
        refused = client.post("/v1/chat/completions", json={"messages": [message, AGAIN]})
        assert (refused.status_code, refused.json["error"]["param"]) == (400, "messages[0]")


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_what_may_become_a_tag_is_no_longer_held_back_at_a_call(client: FlaskClient, dialect: str) -> None:
    said = '<thi\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = BODIES[dialect]({"messages": [ASKED], "max_tokens": 90, "force": said, "tools": tools})
    for stream in (False, True):
        response = client.post(ROUTES[dialect], json={**(body or {}), "stream": stream}, buffered=True)
        value = STREAMS[dialect](response.text) if stream else response.json
        first, second = value["output" if dialect == "responses" else "content"]
        assert (first if dialect == "messages" else first["content"][0])["text"] == "<thi"
        assert second["type"] in ("function_call", "tool_use")
