"""A readout declares its options itself: requests, the library, the schema and benchmarks have them from its line on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from flask.testing import FlaskClient

import steering
from probes.answering.wire import diagnostics
from server.app import create_app
from server.errors import BadRequest
from server.settings import Settings
from server.wire.chat import ChatRequest, with_interventions
from server.wire.parse import parse
from steering import Diagnose, RequestError
from steering.protocol.readout import REGISTRY, FinishedAnswer, Readout, ReadoutOption, register
from steering.protocol.signals import Signal
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine


def refuses_loud(value: str, mllm: Any, layout: Any) -> None:
    if value == "loud":
        raise RequestError("'diagnostics.tone' cannot be loud here.", param="diagnostics.tone")


TONE = ReadoutOption.word("tone", ("soft", "loud"), "How it is said.")
TWICE = ReadoutOption.flag(
    "twice", "Say it twice.", lambda value, mllm, layout: refuses_loud("loud" * value, mllm, layout)
)


class Echo(Readout):
    """A count of the tokens, in a tone."""

    name = "echo"
    options: ClassVar[tuple[ReadoutOption, ...]] = (TONE, TWICE)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset()

    def read(self, answer: FinishedAnswer) -> Any:
        return {"tone": answer.options[TONE], "tokens": len(answer.tokens) * (1 + answer.options[TWICE])}


class Other(Echo):
    """The same under another name, with an option of its own that is called the same."""

    name = "other"
    options = (ReadoutOption.flag("tone", "Something else."),)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(REGISTRY)
    register(Echo())
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def read(**options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], "diagnostics": options}
    return parse(json.dumps(body).encode(), with_interventions(ChatRequest)).diagnostics


def test_the_library_has_them_by_name(registered: None) -> None:
    asked = Diagnose(["echo"], tone="loud")
    assert (asked.tone, asked[TONE], asked.twice, asked.given) == ("loud", "loud", False, {"tone": "loud"})
    assert Diagnose(["echo"], tone="soft") == Diagnose(["echo"])
    assert asked.without("tone") == Diagnose(["echo"])
    for wrong, param in (({"tone": "shrill"}, "diagnostics.tone"), ({"twice": 1}, "diagnostics.twice")):
        with pytest.raises(RequestError) as refused:
            Diagnose(["echo"], **wrong)
        assert refused.value.param == param
    with pytest.raises(RequestError, match=r"'diagnostics\.volume' is unknown; allowed: .*tone, twice"):
        Diagnose(["echo"], volume=3)
    with pytest.raises(AttributeError):
        _ = asked.volume


def test_requests_have_them_and_their_schema(registered: None) -> None:
    assert (read(tone="loud").tone, read().twice) == ("loud", False)
    with pytest.raises(BadRequest, match=r"'diagnostics\.twice' must be a boolean"):
        read(twice="yes")
    schema = with_interventions(ChatRequest).model_json_schema()["$defs"]["Diagnostics"]["properties"]
    assert schema["tone"] == {
        "default": "soft", "description": "How it is said.", "enum": ["soft", "loud"], "title": "Tone", "type": "string",
    }  # fmt: skip
    assert schema["include"]["anyOf"][0]["items"]["enum"][-1] == "echo"


def test_nothing_of_them_is_left_where_the_readout_is_not() -> None:
    with pytest.raises(BadRequest, match=r"'diagnostics\.tone' is unknown"):
        read(tone="loud")
    assert diagnostics(Diagnose(["focus"])) == {"include": ["focus"]}


def test_the_engine_is_given_them(registered: None, fake: FakeEngine) -> None:
    fake.can(readouts=frozenset(REGISTRY))
    client: FlaskClient = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    assert ask(client, diagnostics={"include": ["echo"], "tone": "loud", "layers": {"last": 2}}).status_code == 200
    asked = fake.requests[-1].readouts
    assert asked == Diagnose(["echo"], tone="loud", last_layers=2)
    assert diagnostics(asked) == {"include": ["echo"], "tone": "loud", "layers": {"last": 2}}
    error = ask(client, diagnostics={"include": ["echo"], "tone": "shrill"}).json["error"]
    assert error["message"] == "'diagnostics.tone' must be one of soft, loud; got 'shrill'."


def test_what_does_not_fit_is_refused_with_the_prompt_in_hand(registered: None, engine: steering.Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="cannot be loud"):
        engine.submit(steering.Request(chat, diagnose=Diagnose(["echo"], twice=True)))


def test_two_options_cannot_have_one_name(registered: None) -> None:
    with pytest.raises(ValueError, match="another option 'tone'"):
        register(Other())
