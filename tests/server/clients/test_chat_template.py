"""Fields that a request passes to the chat template, continued answers, and ignored fields, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import Settings
from steering import Request, Sampling
from tests.families.calling import calling
from tests.server.api.choices import choice_of, refused
from tests.server.api.test_streams import events
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine

CHAT = "/v1/chat/completions"
THINKING = "{%- if enable_thinking is defined and enable_thinking is false -%}{{- 'Quiet.' }}{%- endif -%}"
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def thinking(root: Path) -> Iterator[tuple[FlaskClient, steering.Engine]]:
    """Yield a client of a model whose template reads `enable_thinking` and describes tools, and its engine."""
    model = steering.load(calling(root), device="cpu")
    model.processor.chat_template = model.template + THINKING
    engine = steering.Engine(model, slots=4, max_length=1024, self_check=False, threads=1)
    engine.start()
    yield create_app(Settings(), engine=engine).test_client(), engine
    engine.stop()


def post(client: FlaskClient, *messages: Any, **fields: Any) -> Any:
    body = {"messages": list(messages), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return client.post(CHAT, json=body | fields)


# --- variables of the template ---------------------------------------------------------------------------------------


def test_variables_reach_the_template_and_others_are_named(thinking: tuple[FlaskClient, steering.Engine]) -> None:
    client, engine = thinking
    chat, sampling = [user("Is it red?")], Sampling(max_tokens=6, ignore_eos=True)
    prompts = []
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": False, "foo": 1, "bar": None}):
        answer = post(client, *chat, chat_template_kwargs=variables)
        known = {name: value for name, value in variables.items() if name == "enable_thinking"}
        (result,) = engine.generate([Request(chat, sampling, chat_template_kwargs=known)])
        assert choice_of(answer)["message"]["content"] == result.choices[0].text
        assert answer.json["usage"]["prompt_tokens"] == result.prompt_tokens
        prompts.append(result.prompt_tokens)
    assert prompts[0] < prompts[1] == prompts[2]
    assert set(answer.json["ignored"]) == {"chat_template_kwargs.foo", "chat_template_kwargs.bar"}
    (card, *_) = client.get("/v1/models").json["data"]
    assert card["chat_template_kwargs"] == ["enable_thinking"]


def test_what_the_server_sets_cannot_be_set(thinking: tuple[FlaskClient, steering.Engine]) -> None:
    client, _ = thinking
    for name in ("messages", "tools", "tokenize", "add_generation_prompt", "eos_token", "chat_template", "range"):
        error = refused(post(client, user("a"), chat_template_kwargs={name: "x"}))
        assert (error["param"], error["code"]) == (f"chat_template_kwargs.{name}", "unsupported_value")
    same = {"add_generation_prompt": True, "tokenize": False}
    assert "ignored" not in post(client, user("a"), chat_template_kwargs=same).json
    error = refused(post(client, user("a"), chat_template_kwargs={"enable_thinking": "x" * 20_000}))
    assert error["param"] == "chat_template_kwargs"


# --- going on --------------------------------------------------------------------------------------------------------


def test_an_answer_goes_on_from_the_last_words(client: FlaskClient) -> None:
    """The embedded model says the same sentence, and only its rest comes back."""
    whole = choice_of(ask(client, data_uri(), "What is the background colour?"))["message"]["content"]
    words = whole.split()
    begun = " ".join(words[:3])
    messages = [user(data_uri(), "What is the background colour?"), {"role": "assistant", "content": begun}]
    for fields in ({"add_generation_prompt": False}, {}):  # vLLM wants both, SGLang has one
        body = {"messages": messages, "temperature": 0, "continue_final_message": True, **fields}
        choice = choice_of(client.post(CHAT, json=body))
        assert begun + choice["message"]["content"] == whole
        *chunks, _ = events(client.post(CHAT, json=body | {"stream": True}))
        rest = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert begun + rest == whole
    error = refused(client.post(CHAT, json={"messages": messages[:1], "continue_final_message": True}))
    assert error["param"] == "continue_final_message"


# --- pictures of tools and assistants --------------------------------------------------------------------------------


def test_pictures_in_the_results_of_tools(thinking: tuple[FlaskClient, steering.Engine]) -> None:
    """Agents send screenshots like this; the catalogue's limits and readouts count them."""
    client, _ = thinking
    shown = {"role": "tool", "tool_call_id": "1", "content": user(data_uri(), "The screen")["content"]}
    chat = [user("Which button?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, shown]
    envelope = choice_of(post(client, *chat, diagnostics={"include": ["focus", "patches"]}))["diagnostics"]
    assert [one["image"] for one in envelope["images"]] == [1]
    assert envelope["rows"]["question"] == 0
    assert len(envelope["focus"]["sigma"][0]) == 1
    wrong = {**shown, "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    error = refused(post(client, *chat[:2], wrong))
    assert error["param"] == "messages[2].content[0].image_url"


def test_pictures_in_turns_of_the_assistant(client: FlaskClient) -> None:
    drawn = {"role": "assistant", "content": user(data_uri(), "Here.")["content"]}
    wanted = {"include": ["focus"], "target_image": 1}
    choice = choice_of(post(client, user("Draw."), drawn, user("What is the background colour?"), diagnostics=wanted))
    assert choice["diagnostics"]["rows"]["question"] > 0
    assert choice["diagnostics"]["focus"]["target_image"] == 1


# --- what nothing reads ----------------------------------------------------------------------------------------------


def test_unknown_fields_are_named_in_the_answer(client: FlaskClient) -> None:
    named = {**user("Hi."), "name": "Ann"}
    body = {"messages": [named], "max_tokens": 3, "banana": 1, "user": "u", "chat_template_kwargs": {"foo": 1}}
    expected = ["banana", "messages[0].name", "chat_template_kwargs.foo"]
    assert set(client.post(CHAT, json=body).json["ignored"]) == set(expected)
    for more, last in (({}, -2), ({"n": 2}, -2), ({"stream_options": {"include_usage": True}}, -2)):
        payloads = events(client.post(CHAT, json=body | {"stream": True, **more}))
        assert payloads[-1] == "[DONE]"
        assert [set(one.get("ignored", ())) for one in payloads[:-1] if "ignored" in one] == [set(expected)]
        assert "ignored" in payloads[last]
    plain = client.post(CHAT, json={"messages": [user("Hi.")], "max_tokens": 3, "user": "u", "store": False}).json
    assert "ignored" not in plain


def test_strict_refuses_them(client: FlaskClient, fake: FakeEngine) -> None:
    for fields, param in (
        ({"banana": 1}, "banana"),
        ({"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo"),
        ({"messages": [{**user("Hi."), "name": "Ann"}]}, "messages[0].name"),
    ):
        error = refused(client.post(CHAT, json={"messages": [user("Hi.")], "strict": True, **fields}))
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert choice_of(client.post(CHAT, json={"messages": [user("Hi.")], "strict": True, "max_tokens": 2}))
    lenient = client.post(CHAT, json={"messages": [user("Hi.")], "strict": False, "max_tokens": 2, "banana": 1})
    assert lenient.json["ignored"] == ["banana"]


def test_a_dry_run_names_them(client: FlaskClient) -> None:
    asked = {"steering": {"strength": 1}, "banana": 1}
    report = client.post("/v1/steering/validate", json=asked)
    assert report.json["ignored"] == ["banana"], report.text
    begun = {"messages": [user("Hi."), {"role": "assistant", "content": "He"}], "continue_final_message": True}
    assert client.post("/v1/steering/validate", json={"steering": {}, **begun}).status_code == 200
    assert refused(client.post("/v1/steering/validate", json=asked | {"strict": True}))["param"] == "banana"
