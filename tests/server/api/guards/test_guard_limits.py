"""Guards within a request's time, and what journal and metrics tell of the kept answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.api.guards.asking import BASE, CHAT, READ, THEN, ask, journaling
from tests.server.dialects.speaking import STREAMS
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import rows_of
from tests.waiting import wait_for

AGAIN = {"when": {"mean_logprob": "< 0"}, "then": {"temperature": 1}}


@pytest.fixture(scope="module")
def client(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    guard = {"when": {"mean_logprob": "< 0"}, "then": THEN}
    presets = {
        "careful": {"guard": guard, "guard_stream": "first"},
        "steered": {"sage": True, "guard": {"when": guard["when"], "then": {"sage": None}}},
    }
    with journaling(engine, tmp_path_factory, presets) as client:
        yield client


@pytest.fixture(scope="module")
def between(client: FlaskClient) -> str:
    """Return the condition on the attention ratio that the plain answer meets and the steered one does not."""
    answers = (ask(client, **READ), ask(client, **READ, **THEN))
    plain, steered = (answer["choices"][0]["diagnostics"]["modality"]["attention_ratio"] for answer in answers)
    assert plain != pytest.approx(steered, rel=1e-4)
    return f"{'<' if plain < steered else '>'} {(plain + steered) / 2!r}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_answer_is_kept_where_the_time_for_another_is_over(live: Any, stream: bool) -> None:
    engine = FakeEngine("One")
    engine.diagnostics = {"confidence": {"mean_logprob": -1.0, "least_logprob": -2.0}}
    app = create_app(Settings(request_timeout=2.0), engine=engine)
    hangs, submit = threading.Event(), engine.submit

    def again(request: Any) -> Any:
        engine.script = ("Two", hangs) if engine.requests else ("One",)
        return submit(request)

    engine.submit = again  # type: ignore[method-assign]
    response = app.test_client().post(CHAT, json=BASE | {"guard": AGAIN, "stream": stream}, buffered=True)
    assert response.status_code == 200, response.text
    value = STREAMS["chat"](response.text) if stream else response.json
    (choice,) = value["choices"]
    assert choice["message"]["content"] == "One"
    assert choice["guard"]["outcome"] == "failed"
    assert choice["guard"]["failed"] == "The answer took longer than 2 seconds."
    assert len(choice["guard"]["answers"]) == 1
    if not stream:
        assert value["usage"]["completion_tokens"] == 2, "tokens of a try that was cut off count"
    wait_for(engine.completions[-1].cancelled.is_set)
    assert len(engine.completions) == 2
    assert 'helmsight_disconnects_total{reason="late"}' not in app.test_client().get("/metrics").text


def test_an_unfinished_first_answer_is_given_up_at_the_deadline() -> None:
    engine = FakeEngine("One", threading.Event())
    app = create_app(Settings(request_timeout=1.5), engine=engine)
    assert app.test_client().post(CHAT, json=BASE | {"guard": AGAIN}).status_code == 504
    assert len(engine.completions) == 1


def test_an_answer_that_could_only_be_the_same_is_not_given_again(client: FlaskClient) -> None:
    raised = {"mean_logprob": "< 0"}
    for then in ({"temperature": 0}, {"top_p": 0.5}, {"seed": 7}, {"sage": None}):
        value = ask(client, guard={"when": raised, "then": then, "retries": 3})
        guard = value["choices"][0]["guard"]
        assert (guard["outcome"], guard["kept"], len(guard["answers"])) == ("same", 0, 1), then
    for then in ({"max_tokens": 2}, {"repetition_penalty": 2.0}, {"temperature": 1.0, "seed": 1}, THEN):
        value = ask(client, guard={"when": raised, "then": then, "retries": 2})
        answers = value["choices"][0]["guard"]["answers"]
        assert len(answers) == (3 if "temperature" in then else 2), then


@pytest.mark.parametrize("off", [False, None])
def test_a_request_switches_its_presets_guard_off(client: FlaskClient, off: Any) -> None:
    model = "helmsight-demo@careful"
    assert "guard" in ask(client, model=model)["choices"][0]
    value = ask(client, model=model, guard=off)
    assert "guard" not in value["choices"][0]
    assert "ignored" not in value, "the preset's guard_stream is nothing that the client sent"
    assert "guard" not in ask(client, guard=off)["choices"][0]


def test_null_in_then_switches_off_what_the_preset_asks_for(client: FlaskClient) -> None:
    answers = ask(client, model="helmsight-demo@steered")["choices"][0]["guard"]["answers"]
    assert [(answer["applied"] or {}).get("sage") is not None for answer in answers] == [True, False]


def test_journal_and_metrics_tell_of_the_request_whose_answer_was_kept(client: FlaskClient, between: str) -> None:
    def counted(intervention: str) -> float:
        head = f'helmsight_attention_ratio_count{{intervention="{intervention}"'
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(head)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    rows = len(client.get("/v1/diagnostics?limit=1000").json["data"])
    before = {name: counted(name) for name in ("none", "steer:text")}
    then = THEN | {"temperature": 0.0, "seed": 5}
    guarded = ask(client, guard={"when": {"attention_ratio": between}, "then": then}, **READ)
    assert guarded["choices"][0]["guard"]["outcome"] == "retry"
    assert {name: counted(name) - count for name, count in before.items()} == {"none": 0, "steer:text": 1}
    ask(client, **READ, **THEN)
    ask(client, guard={"when": {"mean_logprob": "> 0"}, "then": THEN})
    quiet, alone, kept = rows_of(client, rows + 3)[:3]
    for name in (
        "interventions",
        "toward",
        "vectors",
        "digests",
        "diagnostics",
        "usage",
    ):  # the tokens of the kept answer
        assert kept[name] == alone[name], name
    assert alone["interventions"] == ["steering"]
    assert (kept["sampling"]["seed"], kept["sampling"]["n"]) == (6, 1)
    assert kept["asked"]["guard"] == {"when": {"attention_ratio": between}, "then": then}
    assert (quiet["interventions"], quiet["toward"]) == ([], "none")


def test_the_journal_keeps_no_text_of_a_guard(client: FlaskClient) -> None:
    then = {"contrast": {"kind": "icd", "instruction": "You are a secret agent."}}
    rows = len(client.get("/v1/diagnostics?limit=1000").json["data"])
    ask(client, guard={"when": {"mean_logprob": "> 0"}, "then": then})
    row = rows_of(client, rows + 1)[0]
    assert row["asked"]["guard"]["then"]["contrast"]["kind"] == "icd"
    assert "secret" not in str(row)


def test_the_kept_answer_has_the_drift_that_its_own_request_would_have(client: FlaskClient, between: str) -> None:
    read = {"diagnostics": {"include": ["modality", "drift"]}}
    guard = {"when": {"attention_ratio": between}, "then": THEN}

    def drift(**fields: Any) -> Any:
        value = ask(client, **fields)
        choice = value["choices"][0]
        assert choice.get("guard", {"outcome": "retry"})["outcome"] == "retry"
        return value["id"], choice["diagnostics"]["drift"]

    _, alone = drift(**read, **THEN, baseline=True)
    _, kept = drift(**read, guard=guard, baseline=True)
    assert kept["to"] == alone["to"] == "baseline"
    assert kept["cosine"] == pytest.approx(alone["cosine"], abs=1e-4)
    assert min(kept["cosine"]) < 0.9999
    earlier, _ = drift(**read)
    compared = {"diagnostics": read["diagnostics"] | {"compare_to": earlier}}
    _, kept = drift(**compared, guard=guard)
    assert (kept["to"], kept["cosine"]) == (earlier, pytest.approx(alone["cosine"], abs=1e-3))
