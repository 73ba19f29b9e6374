"""Guards: an answer that meets a condition is given again, and the better one is kept, whole or streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from flask.testing import FlaskClient
from pydantic import SecretStr

import steering
from server.app import create_app
from server.settings import Settings
from steering import Busy
from tests.server.api.choices import refused
from tests.server.api.guards.asking import BASE, CHAT, READ, THEN, ask, journaling
from tests.server.conftest import user
from tests.server.dialects.speaking import BODIES, ROUTES, STREAMS, events
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import rows_of
from tests.server.served.model import served_model
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def client(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    presets = {"careful": {"guard": {"when": {"mean_logprob": "< 0"}, "then": THEN}}}
    with journaling(engine, tmp_path_factory, presets) as client:
        yield client


@pytest.fixture(scope="module")
def plain(client: FlaskClient) -> Any:
    return ask(client, **READ)


@pytest.fixture(scope="module")
def steered(client: FlaskClient) -> Any:
    return ask(client, **READ, **THEN)


@pytest.fixture(scope="module")
def between(plain: Any, steered: Any) -> str:
    """Return the condition on the attention ratio that the plain answer meets and the steered one does not."""
    one, other = (value["choices"][0]["diagnostics"]["modality"]["attention_ratio"] for value in (plain, steered))
    assert one != pytest.approx(other, rel=1e-4)
    return f"{'<' if one < other else '>'} {(one + other) / 2!r}"


def test_the_answer_that_meets_no_condition_any_more_is_kept(
    client: FlaskClient, plain: Any, steered: Any, between: str
) -> None:
    value = ask(client, guard={"when": {"attention_ratio": between}, "then": THEN})
    (choice,), (expected,) = value["choices"], steered["choices"]
    assert choice["message"] == expected["message"]
    assert choice["applied"] == expected["applied"]
    assert "diagnostics" not in choice
    guard = choice["guard"]
    assert (guard["outcome"], guard["kept"]) == ("retry", 1)
    assert [answer["raised"] for answer in guard["answers"]] == [["attention_ratio"], []]
    assert guard["answers"][0]["text"] == plain["choices"][0]["message"]["content"]
    ratios = [value["choices"][0]["diagnostics"]["modality"]["attention_ratio"] for value in (plain, steered)]
    assert [answer["numbers"]["attention_ratio"] for answer in guard["answers"]] == pytest.approx(ratios, rel=1e-5)
    for name in ("prompt_tokens", "completion_tokens"):
        assert value["usage"][name] == plain["usage"][name] + steered["usage"][name], "all tries count"


def test_the_first_answer_is_kept_where_the_new_one_is_no_better(client: FlaskClient, plain: Any) -> None:
    value = ask(client, guard={"when": {"mean_logprob": "< 0"}, "then": THEN, "retries": 2}, **READ)
    (choice,) = value["choices"]
    assert choice["message"] == plain["choices"][0]["message"]
    assert choice["diagnostics"]["modality"] == plain["choices"][0]["diagnostics"]["modality"]
    assert (choice["guard"]["outcome"], choice["guard"]["kept"]) == ("first", 0)
    assert len(choice["guard"]["answers"]) == 2, "a greedy answer is given again once"


def test_nothing_is_given_again_where_no_condition_is_met(client: FlaskClient, plain: Any, between: str) -> None:
    for guard in (
        {"when": {"mean_logprob": "> 0"}, "then": THEN},
        {"when": {"target_image": "== 1"}, "then": THEN},  # a number that the answer does not have
        {"when": {"attention_ratio": between, "mean_logprob": "> 0"}, "then": THEN, "match": "all"},
    ):
        value = ask(client, guard=guard)
        (choice,) = value["choices"]
        assert choice["message"] == plain["choices"][0]["message"]
        assert (choice["guard"]["outcome"], len(choice["guard"]["answers"])) == ("quiet", 1)
        assert value["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("mode", ["hold", "first"])
def test_a_stream_is_held_or_says_at_its_end_what_replaces_it(
    client: FlaskClient, plain: Any, steered: Any, between: str, mode: str
) -> None:
    body = BASE | {"guard": {"when": {"attention_ratio": between}, "then": THEN}, "guard_stream": mode, "stream": True}
    kept = steered["choices"][0]["message"]["content"]
    streamed = kept if mode == "hold" else plain["choices"][0]["message"]["content"]
    for dialect, route in ROUTES.items():
        spoken = BODIES[dialect](body)
        response = client.post(route, json=spoken, buffered=True)
        assert response.status_code == 200, response.text
        text = response.text
        assert '"outcome":"retry"' in text
        if dialect == "chat":
            value = STREAMS["chat"](text)["choices"][0]
            assert (value["message"]["content"], value["guard"]["answers"][1]["text"]) == (streamed, kept)
        elif dialect == "messages":
            blocks = STREAMS["messages"](text)["content"]
            assert "".join(block["text"] for block in blocks) == streamed
        else:
            value = [*events(text)][-1]["response"]
            assert value["output"][0]["content"][0]["text"] == kept
            assert value["guard"]["kept"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_is_judged_alone(client: FlaskClient, stream: bool) -> None:
    drawn = {"messages": [user("Tell me a story.")], "max_tokens": 12, "temperature": 2.0, "seed": 3, "n": 4}
    drawn |= {"diagnostics": {"include": ["confidence"]}, "ignore_eos": True}
    alone = ask(client, **drawn)
    scores = {choice["index"]: choice["diagnostics"]["confidence"]["mean_logprob"] for choice in alone["choices"]}
    second, third = sorted(scores.values())[1:3]
    assert third - second > 1e-3
    bound = (second + third) / 2
    response = client.post(CHAT, json=BASE | drawn | {"stream": stream, "guard": {
        "when": {"mean_logprob": f"< {bound!r}"}, "then": {"temperature": 0}
    }}, buffered=True)  # fmt: skip
    assert response.status_code == 200
    if stream:
        assert response.text.count('"outcome":"quiet"') == 2
        return
    for choice in response.json["choices"]:
        answers = choice["guard"]["answers"]
        assert len(answers) == (2 if scores[choice["index"]] < bound else 1)
        assert answers[0]["text"] == alone["choices"][choice["index"]]["message"]["content"]


@pytest.mark.parametrize(
    ("guard", "param"),
    [
        ({"when": {}, "then": THEN}, "guard.when"),
        ({"when": {"alarm": True}, "then": {}}, "guard.then"),
        ({"when": {"unheard": True}, "then": THEN}, "guard.when.unheard"),
        ({"when": {"alarm": "< 1"}, "then": THEN}, "guard.when.alarm"),
        ({"when": {"focus_share": True}, "then": THEN}, "guard.when.focus_share"),
        ({"when": {"focus_share": "about .5"}, "then": THEN}, "guard.when.focus_share"),
        ({"when": {"focus_share": "< .5"}, "then": {"messages": []}}, "guard.then.messages"),
        ({"when": {"focus_share": "< .5"}, "then": {"steering": {"toward": "left"}}}, "guard.then.steering.toward"),
        ({"when": {"focus_share": "< .5"}, "then": {"temperature": 9}}, "guard.then.temperature"),
        ({"when": {"focus_share": "< .5"}, "then": THEN, "retries": 9}, "guard.retries"),
        ({"when": {"focus_share": "< .5"}, "then": THEN, "else": 1}, "guard.else"),
    ],
)
def test_what_a_guard_cannot_be(client: FlaskClient, guard: Any, param: str) -> None:
    assert refused(client.post(CHAT, json=BASE | {"guard": guard}), 400)["param"] == param


def test_a_number_that_the_model_lacks_is_refused(fake: FakeEngine) -> None:
    def posted(number: str) -> Any:
        guard = {"when": {number: True if number == "alarm" else "< 0"}, "then": {"temperature": 1}}
        return create_app(Settings(), engine=fake).test_client().post(CHAT, json=BASE | {"guard": guard})

    error = refused(posted("alarm"), 400)
    assert (error["param"], error["code"]) == ("guard.when.alarm", "unsupported_value")
    assert "not calibrated" in error["message"]
    fake.can(readouts=frozenset({"focus"}))
    error = refused(posted("mean_logprob"), 400)
    assert (error["param"], error["code"]) == ("guard.when.mean_logprob", "unsupported_value")
    assert "does not support" in error["message"]


def test_a_preset_guards_and_metrics_and_journal_tell_how_often(client: FlaskClient) -> None:
    before = len(client.get("/v1/diagnostics?limit=1000").json["data"])
    ask(client, model="helmsight-demo@careful")
    ask(client)
    plain, guarded = rows_of(client, before + 2)[:2]
    assert (plain["guard"], guarded["guard"]) == (None, "first")
    assert 'helmsight_guarded_total{outcome="first"}' in client.get("/metrics").text


def test_the_first_answer_is_kept_where_a_new_one_cannot_be_given() -> None:
    engine = FakeEngine("One", " two")
    engine.diagnostics = {"confidence": {"mean_logprob": -1.0, "least_logprob": -2.0}}
    client = create_app(Settings(), engine=engine).test_client()
    submit = engine.submit

    def once(request: Any) -> Any:
        if engine.requests:
            raise Busy(2, retry_after=1.0)
        return submit(request)

    engine.submit = once  # type: ignore[method-assign]
    guard = {"when": {"mean_logprob": "< 0"}, "then": {"temperature": 1}}
    (choice,) = client.post(CHAT, json=BASE | {"guard": guard}).json["choices"]
    assert choice["message"]["content"] == "One two"
    assert choice["guard"]["outcome"] == "failed"
    assert "answers" in choice["guard"]["failed"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_has_a_seed_of_its_own(client: FlaskClient, stream: bool) -> None:
    drawn: dict[str, Any] = {"messages": [user("Tell me a story.")], "max_tokens": 12, "temperature": 1.5}
    guard: dict[str, Any] = {"when": {"mean_logprob": "< 0"}, "then": {"temperature": 1.5}, "retries": 3}
    value = ask(client, **drawn, seed=100, guard=guard, stream=stream, ignore_eos=True)
    answers = value["choices"][0]["guard"]["answers"]
    assert [answer["seed"] for answer in answers] == [100, 101, 102, 103]
    for answer in answers:  # each seed alone gives its answer again
        alone = ask(client, **drawn, seed=answer["seed"], ignore_eos=True)
        assert alone["choices"][0]["message"]["content"] == answer["text"]
    assert len({answer["text"] for answer in answers}) > 1
    several = ask(client, **drawn, seed=7, n=2, guard=guard | {"retries": 1}, ignore_eos=True)
    for choice in several["choices"]:
        for answer in choice["guard"]["answers"]:
            alone = ask(client, **drawn, seed=answer["seed"], ignore_eos=True)
            assert alone["choices"][0]["message"]["content"] == answer["text"]
    unseeded = ask(client, **drawn, guard=guard | {"retries": 1})
    assert [answer["seed"] for answer in unseeded["choices"][0]["guard"]["answers"]] == [None, None]
    other = ask(client, **drawn, seed=100, guard=guard | {"then": {"seed": 2**63 - 1}, "retries": 1})
    assert other["choices"][0]["guard"]["answers"][1]["seed"] == -(2**63), "seeds wrap around"


def test_a_new_answer_that_was_cut_is_not_kept_and_named_so(client: FlaskClient) -> None:
    ratio = ask(client, max_tokens=40, **READ)["choices"][0]["diagnostics"]["modality"]["attention_ratio"]
    guard = {"when": {"attention_ratio": f"== {ratio!r}"}, "then": THEN | {"max_tokens": 2}}
    (choice,) = ask(client, max_tokens=40, guard=guard)["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["guard"]["outcome"], choice["guard"]["kept"]) == ("cut", 0)
    assert [answer["raised"] for answer in choice["guard"]["answers"]] == [["attention_ratio"], []]
    assert choice["guard"]["answers"][1]["finish_reason"] == "length"


def test_the_kept_answer_satisfies_the_schema(client: FlaskClient) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
    whole = ask(client, response_format=form, max_tokens=60, **READ)["choices"][0]
    bound = whole["diagnostics"]["modality"]["attention_ratio"]
    for then, outcome in ((THEN, "retry"), (THEN | {"max_tokens": 2}, "cut")):
        guard = {"when": {"attention_ratio": f"== {bound!r}"}, "then": then}
        (choice,) = ask(client, response_format=form, max_tokens=60, guard=guard)["choices"]
        assert json.loads(choice["message"]["content"])["colour"] in ("red", "blue")
        assert choice["guard"]["outcome"] == outcome
        assert len(choice["guard"]["answers"]) == 2


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    """Yield a client of a model whose template knows tools."""
    folder = served_model(tmp_path_factory.mktemp("caller") / "model")
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=4, self_check=False, threads=1)
    engine.start()
    yield create_app(Settings(journal=SecretStr("off")), engine=engine).test_client()
    engine.stop()


@pytest.mark.parametrize("mode", [None, "hold", "first"])
def test_the_kept_answer_calls_a_tool_as_a_whole(caller: FlaskClient, mode: str | None) -> None:
    client = caller
    parameters = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": parameters, "strict": True}}
    body = {"tools": [tool], "tool_choice": "required", "max_tokens": 400}
    bound = ask(client, **body, **READ)["choices"][0]["diagnostics"]["modality"]["attention_ratio"]
    for then, outcome in ((THEN, "retry"), (THEN | {"max_tokens": 2}, "cut")):
        guard = {"when": {"attention_ratio": f"== {bound!r}"}, "then": then}
        streamed = {} if mode is None else {"stream": True, "guard_stream": mode}
        (choice,) = ask(client, **body, guard=guard, **streamed)["choices"]
        answers = choice["guard"]["answers"]
        assert (choice["guard"]["outcome"], len(answers)) == (outcome, 2)
        kept = answers[choice["guard"]["kept"]]
        assert kept["finish_reason"] == "tool_calls"
        (called,) = kept["tool_calls"]
        assert (called["name"], json.loads(called["arguments"])["colour"] in ("red", "blue")) == ("paint", True)
        if mode == "first":
            called = answers[0]["tool_calls"][0]
        assert choice["message"]["tool_calls"][0]["function"] == called


def test_what_a_guard_can_be_is_published(client: FlaskClient) -> None:
    card = client.get("/v1/models").json["data"][0]["guard"]
    conditions = {condition["name"]: condition for condition in card["conditions"]}
    assert conditions["alarm"]["type"] == "boolean"
    assert conditions["attention_ratio"] == {
        "name": "attention_ratio", "readout": "modality", "type": "number", "available": True,
    }  # fmt: skip
    for name, condition in conditions.items():  # every published condition is accepted
        value = True if condition["type"] == "boolean" else f"{card['signs'][0]} 0"
        ask(client, max_tokens=1, guard={"when": {name: value}, "then": {"temperature": 0}})
    assert {"steering", "sage", "temperature"} <= set(card["then"])
    assert "messages" not in card["then"]
    assert card["max_retries"] == 3


def test_metrics_tell_how_often_a_guard_acted_what_changed_and_its_cost(
    client: FlaskClient, plain: Any, steered: Any, between: str
) -> None:
    def counts() -> dict[str, float]:
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "_guard" in name}

    before = counts()
    value = ask(client, guard={"when": {"attention_ratio": between}, "then": THEN})
    texts = [answer["text"] for answer in value["choices"][0]["guard"]["answers"]]
    tokens = steered["usage"]["completion_tokens"]
    grown = {name: count - before.get(name, 0) for name, count in counts().items()}
    assert grown['helmsight_guarded_total{outcome="retry"}'] == 1
    assert grown['helmsight_guard_raised_total{condition="attention_ratio"}'] == 1
    assert grown["helmsight_guard_changed_total"] == (texts[0] != texts[1])
    assert grown["helmsight_guard_tokens_total"] == tokens
    guards = client.get("/v1/diagnostics/summary").json["guards"]
    assert guards["retry"] >= 1
    assert set(guards) <= {"quiet", "first", "cut", "retry", "same", "failed"}


SCORED = {"confidence": {"mean_logprob": -1.0, "least_logprob": -2.0}}
AGAIN = {"when": {"mean_logprob": "< 0"}, "then": {"temperature": 1}}


def waiting_retry(engine: FakeEngine) -> threading.Event:
    """Let every answer after the first wait for the event that is returned."""
    go_on = threading.Event()
    engine.diagnostics, submit = SCORED, engine.submit

    def again(request: Any) -> Any:
        engine.script = ("Two", go_on) if engine.requests else ("One",)
        return submit(request)

    engine.submit = again  # type: ignore[method-assign]
    return go_on


def test_a_client_that_leaves_a_stream_ends_the_retry(live: Any, fake: FakeEngine) -> None:
    waiting_retry(fake)
    url = urlsplit(live(create_app(Settings(), engine=fake)))
    connection = HTTPConnection(url.hostname or "", url.port)
    body = json.dumps(BASE | {"guard": AGAIN, "stream": True})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    connection.getresponse().read(1)
    wait_for(lambda: len(fake.completions) == 2)
    assert not fake.completions[1].cancelled.is_set()
    connection.close()
    wait_for(fake.completions[1].cancelled.is_set)
