"""POST /v1/chat/completions on the real engine: answers, and requests that are wrong."""

from __future__ import annotations

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.http.watcher import Watcher
from server.settings import Settings
from tests.server.api.choices import QUESTION, choice_of, refused
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine
from tests.waiting import wait_for


def test_a_plain_answer_has_openais_fields_and_no_others(client: FlaskClient, engine: steering.Engine) -> None:
    response = ask(client, data_uri(), QUESTION)
    body = response.json
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == engine.mllm.name
    assert set(choice_of(response)) == {"index", "message", "logprobs", "finish_reason"}
    assert choice_of(response)["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_answer_is_the_engines(client: FlaskClient, engine: steering.Engine) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (84, 84), "red")},
                                             {"type": "text", "text": QUESTION}]}]  # fmt: skip
    (result,) = engine.generate([steering.Request(messages, steering.Sampling(max_tokens=8))])
    assert choice_of(ask(client, data_uri(), QUESTION))["message"]["content"] == result.choices[0].text


def test_n_seed_and_logprobs(client: FlaskClient) -> None:
    fields = {"n": 3, "temperature": 1.5, "seed": 7, "logprobs": True, "top_logprobs": 2}
    first, second = (ask(client, QUESTION, **fields).json["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert [choice["message"] for choice in first] == [choice["message"] for choice in second]
    token = first[0]["logprobs"]["content"][0]
    assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(token["top_logprobs"]) == 2
    assert token["logprob"] <= 0


def test_stop_strings_end_the_answer(client: FlaskClient) -> None:
    full = choice_of(ask(client, data_uri(), "Describe the picture."))["message"]["content"]
    word = full.split()[1]
    cut = choice_of(ask(client, data_uri(), "Describe the picture.", stop=word))
    assert cut["message"]["content"] == full.partition(word)[0]
    assert cut["finish_reason"] == "stop"


def test_multi_turn_chats_with_system_and_developer(client: FlaskClient) -> None:
    for role in ("system", "developer"):
        messages = [
            {"role": role, "content": "Be brief."},
            user(data_uri(), QUESTION),
            {"role": "assistant", "content": "Red."},
            user("Are you sure?"),
        ]
        response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
        assert choice_of(response)["message"]["role"] == "assistant"


def test_diagnostics_come_in_the_versioned_envelope(client: FlaskClient) -> None:
    choice = choice_of(
        ask(client, data_uri(), "a", data_uri(Image.new("RGB", (84, 84), "blue")), QUESTION, diagnostics=True)
    )
    envelope = choice["diagnostics"]
    assert envelope["version"] == 2
    assert [image["image"] for image in envelope["images"]] == [1, 2]
    assert {"focus", "modality", "decay"} <= set(envelope)


def test_diagnostics_by_name(client: FlaskClient) -> None:
    wanted = {"include": ["focus"], "target_image": 1}
    envelope = choice_of(ask(client, data_uri(), QUESTION, diagnostics=wanted))["diagnostics"]
    assert "modality" not in envelope
    assert envelope["focus"]["target_image"] == 1


def test_every_readout_comes_over_the_wire(client: FlaskClient) -> None:
    include = ["focus", "modality", "decay", "decay_layers", "residual", "patches", "tam", "flags", "anchor"]
    wanted = {"include": include, "layers": {"last": 2}, "heatmaps": True, "causal": True}
    choice = choice_of(
        ask(client, data_uri(), "and", data_uri(Image.new("RGB", (84, 84), "blue")), QUESTION, diagnostics=wanted)
    )
    envelope = choice["diagnostics"]
    assert set(envelope) == {"version", "images", "rows", "heatmaps", *include} - {"decay_layers"}
    assert [(one["image"], one["layers"], len(one["rho"][0])) for one in envelope["patches"]] == [
        (1, [6, 7], 9),
        (2, [6, 7], 9),
    ]
    words = [one["token"] for one in envelope["tam"] if one["image"] == 1]
    assert "".join(words) == choice["message"]["content"]
    assert all(one["png"].startswith("data:image/png;base64,") for one in envelope["heatmaps"])
    assert len(envelope["residual"]["neuron_ratio"]) == 8
    assert len(envelope["decay"]["by_layer"]["vision"][0]) == 8


def test_every_readout_of_the_catalogue_may_be_included(client: FlaskClient) -> None:
    model, *_ = client.get("/v1/models").json["data"]
    for name in model["readouts"]:
        response = ask(client, data_uri(), QUESTION, diagnostics={"include": [name]})
        assert response.status_code == 200, name
        has_key = name in response.json["choices"][0]["diagnostics"]
        assert has_key or name == "decay_layers"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"steering": {"vector": "nobody"}}, "steering.vector", "unknown_vector"),
        ({"steering": {"vector": "../modality-preference"}}, "steering.vector", "unknown_vector"),
        ({"steering": {"vector": "damaged"}}, "steering.vector", "bad_vector"),
        ({"steering": {"vector": "stranger"}}, "steering.vector", "wrong_model"),
        ({"steering": {"toward": "auto"}}, "steering.toward", "invalid_value"),
        ({"steering": {"toward": "auto", "strength": 999}}, "steering.strength", "steering_strength_exceeded"),
        ({"steering": {"toward": "auto", "auto": {"criterion": "surprise"}}}, "steering.toward", "invalid_value"),
        ({"steering": {"toward": "auto", "auto": {"bound": 1}}}, "steering.auto.bound", "invalid_value"),
        ({"steering": {"strength": 999}}, "steering.strength", "steering_strength_exceeded"),
        ({"steering": {"strength": -1}}, "steering.strength", "invalid_value"),
        ({"steering": {"layers": [99]}}, "steering.layers", "invalid_value"),
        ({"steering": {"apply": {"tokens": "some"}}}, "steering.apply.tokens", "invalid_value"),
        (
            {"steering": {"vectors": [{"name": "modality-preference", "scale": 999}] * 2}},
            "steering.vectors[0].scale",
            "steering_strength_exceeded",
        ),
        ({"steering": {"vectors": [{"name": "modality-preference"}] * 9}}, "steering.vectors", "invalid_value"),
        ({"diagnostics": {"include": ["charm"]}}, "diagnostics.include", "invalid_value"),
        ({"diagnostics": {"include": ["patches"], "layers": [8]}}, "diagnostics.layers", "invalid_value"),
        ({"diagnostics": {"include": ["patches"], "layers": {"last": 9}}}, "diagnostics.layers", "invalid_value"),
        ({"diagnostics": {"target_image": 2}}, "diagnostics.target_image", "invalid_value"),
        ({"diagnostics": {"spans": "none"}}, "diagnostics.spans", "invalid_value"),
        ({"diagnostics": {"residual_rows": "all"}}, "diagnostics.residual_rows", "invalid_value"),
        ({"diagnostics": {"drift_rows": "first"}}, "diagnostics.drift_rows", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
    ],
)
def test_what_cannot_be_applied_is_refused(client: FlaskClient, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(ask(client, data_uri(), QUESTION, **fields))
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_k": -2}, "'top_k' must be at least -1 and at most 1000000; got -2."),
        ({"top_k": 2**70}, f"'top_k' must be at least -1 and at most 1000000; got {2**70}."),
        ({"min_p": 1.5}, "'min_p' must be at least 0.0 and at most 1.0; got 1.5."),
        ({"seed": 2**64}, f"'seed' must be at least {-(2**63)} and at most {2**63 - 1}; got {2**64}."),
        ({"presence_penalty": -3}, "'presence_penalty' must be at least -2.0 and at most 2.0; got -3.0."),
        (
            {"max_tokens": None, "max_completion_tokens": 0},
            "'max_completion_tokens' must be at least 1; got 0.",
        ),
        (
            {"n": 3, "baseline": True},
            "'n' must be at most 2: this server runs 4 answers at once, and each of yours needs 2 "
            "(baselines and twins count).",
        ),
    ],
)
def test_the_refusal_of_a_sampling_value_names_the_sent_field_and_its_range(
    client: FlaskClient, fields: dict[str, Any], said: str
) -> None:
    error = refused(ask(client, QUESTION, **fields))
    assert (error["message"], error["param"]) == (said, said.split("'")[1])


def test_of_top_k_all_tokens_are_0_and_minus_1(client: FlaskClient) -> None:
    texts = [choice_of(ask(client, QUESTION, temperature=1.5, seed=7, top_k=top_k))["message"] for top_k in (-1, 0)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_fit_are_cut_to_what_fits_and_told(
    client: FlaskClient, engine: steering.Engine, name: str
) -> None:
    response = ask(client, QUESTION, **{"max_tokens": None, name: 32_000})
    room = engine.max_length - response.json["usage"]["prompt_tokens"]
    assert choice_of(response)["applied"] == {"max_tokens": room}
    assert choice_of(response)["finish_reason"] == "stop"
    for largest in (2**31 - 1, 2**53 - 1, 2**63 - 1):  # by which clients of several languages say "any"
        response = ask(client, QUESTION, **{"max_tokens": None, name: largest})
        assert choice_of(response)["applied"] == {"max_tokens": room}
    assert "applied" not in choice_of(ask(client, QUESTION, **{"max_tokens": None, name: room}))
    streamed = ask(client, QUESTION, stream=True, sage=False, **{"max_tokens": None, name: room + 1})
    assert streamed.text.count(f'"applied":{{"max_tokens":{room}}}') == 1
    too_long = refused(ask(client, QUESTION, force="red " * 5_000, **{"max_tokens": None, name: 32_000}))
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "force")


def test_a_prompt_that_is_too_long_is_openais_error(client: FlaskClient) -> None:
    error = refused(ask(client, "red " * 20_000))
    assert error["message"].startswith("This model's maximum context length is ")
    assert error["code"] == "context_length_exceeded"


def test_an_image_that_is_wrong_is_named(client: FlaskClient) -> None:
    error = refused(ask(client, data_uri(), "data:image/png;base64,AAAA", QUESTION))
    assert error["param"] == "messages[0].content[1].image_url"


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (3, 500)])
def test_pictures_of_odd_shapes_do_not_break_the_server(client: FlaskClient, size: tuple[int, int]) -> None:
    assert ask(client, data_uri(Image.new("RGB", size)), QUESTION).status_code in (200, 400)


def test_another_models_name_is_unknown_and_no_name_is_fine(client: FlaskClient) -> None:
    assert refused(ask(client, QUESTION, model="gpt-4o"), 404)["code"] == "model_not_found"
    assert ask(client, QUESTION).status_code == 200


def test_the_body_must_be_json(client: FlaskClient) -> None:
    response = client.post("/v1/chat/completions", data="{}", content_type="text/plain")
    assert refused(response, 415)["code"] == "unsupported_media_type"
    headers = {"Content-Encoding": "gzip"}
    response = client.post("/v1/chat/completions", data=b"{}", content_type="application/json", headers=headers)
    assert refused(response, 415)["code"] == "unsupported_media_type"
    response = client.post("/v1/chat/completions", data="{", content_type="application/json")
    assert refused(response)["code"] == "invalid_json"


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(engine: steering.Engine) -> None:
    client = create_app(Settings(max_body=2000), engine=engine).test_client()
    assert refused(ask(client, "x" * 3000), 413)["type"] == "invalid_request_error"
    body = json.dumps({"messages": [user("x" * 3000)]}).encode()
    response = client.post(
        "/v1/chat/completions",
        input_stream=io.BytesIO(body),
        content_type="application/json",
        headers={"Transfer-Encoding": "chunked"},
        environ_overrides={"wsgi.input_terminated": True},
    )
    refused(response, 413)


def test_defaults_are_the_checkpoints_own_and_then_openais(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    for stated, expected in (({"temperature": 0.0, "top_k": 5}, (0.0, 5)), ({}, (1.0, 0))):
        fake.can(generation_defaults=stated)
        client.post("/v1/chat/completions", json={"messages": [user("hi")]})
        sampling = fake.requests[-1].sampling
        assert (sampling.temperature, sampling.top_k) == expected
    client.post("/v1/chat/completions", json={"messages": [user("hi")], "top_k": -1, "temperature": 0.5})
    assert (fake.requests[-1].sampling.temperature, fake.requests[-1].sampling.top_k) == (0.5, 0)


def test_a_context_span_reaches_the_engine(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    part = {"type": "text", "text": "It is blue.", "span": "context"}
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert fake.requests[-1].messages[0]["content"] == [part]


def test_a_fault_ends_its_request_alone(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.script = ("Hel", steering.Fault("logits were not finite"))
    assert refused(ask(client), 500)["code"] == "generation_failed"
    fake.script = ("Hello",)
    assert choice_of(ask(client))["message"]["content"] == "Hello"


def test_an_answer_that_ends_with_its_engine_is_a_503_so_that_a_proxy_asks_another(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    ended = threading.Event()
    fake.script = ("Hel", ended, steering.Fault("its server is gone"))
    with ThreadPoolExecutor(1) as aside:
        answer = aside.submit(ask, client)
        wait_for(lambda: fake.requests)
        fake.healthy = False
        ended.set()
        assert refused(answer.result(), 503)["code"] == "model_failed"


def test_the_time_of_a_request_counts_from_its_arrival(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(request_timeout=50), engine=fake)  # type: ignore[arg-type]
    now, deadlines = [1000.0], []
    monkeypatch.setattr("server.app.time.monotonic", lambda: now[0])
    submit, add = fake.submit, Watcher.add

    def slowly(request: steering.Request) -> Any:
        now[0] += 20
        return submit(request)

    def added(self: Watcher, connection: Any, deadline: float, give_up: Any, late: Any) -> Any:
        deadlines.append(deadline)
        return add(self, connection, deadline, give_up, late)

    monkeypatch.setattr(fake, "submit", slowly)
    monkeypatch.setattr(Watcher, "add", added)
    assert ask(app.test_client()).status_code == 200
    assert deadlines == [1050.0]


def test_an_unexpected_error_says_nothing_of_the_inside(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.refusal = RuntimeError("secret path /root/x")
    error = refused(ask(client), 500)
    assert "secret" not in error["message"]


def test_numbers_that_json_does_not_know_become_null(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.diagnostics = {"version": 1, "modality": {"attention_ratio": float("nan"), "by_layer": [float("inf"), 1.0]}}
    response = ask(client, diagnostics=True)
    assert json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["diagnostics"]["modality"] == {
        "attention_ratio": None,
        "by_layer": [None, 1.0],
    }


def test_unknown_routes_and_methods_are_error_objects(app: Flask) -> None:
    client = app.test_client()
    assert refused(client.get("/v2/nothing"), 404)["code"] == "unknown_route"
    response = client.put("/v1/chat/completions")
    refused(response, 405)
    assert "POST" in response.headers["Allow"]
    refused(client.get("/v1//models"), 404)


@pytest.mark.parametrize(
    ("route", "instead"),
    [
        ("/v1/completions", "POST /v1/chat/completions"),
        ("/v1/v1/responses", "POST /v1/responses"),
        ("/v1/v1/messages", "POST /v1/messages"),
        ("/messages", "POST /v1/messages"),
        ("/v1/embeddings", "Embeddings are not served"),
        ("/chat/completions", "base URL ends with one /v1"),
        ("/v1/v1/chat/completions", "base URL ends with one /v1"),
    ],
)
def test_routes_of_other_servers_say_what_to_use(client: FlaskClient, route: str, instead: str) -> None:
    response = client.post(
        route, json={"model": "m", "input": "hi"}
    )  # in Anthropic's form where the path is Anthropic's
    error = response.json["error"]
    assert instead in error["message"]
    assert (response.status_code, error["type"], error["code"]) == (404, "not_found_error", "unknown_route")


def test_least_and_exact_lengths(client: FlaskClient) -> None:
    """Under vLLM's names; without them the answer to this question ends by itself, sooner."""
    plain = ask(client, QUESTION, temperature=0, max_tokens=40)
    ended = plain.json["usage"]["completion_tokens"]
    assert ended < 30
    exact = ask(client, QUESTION, temperature=0, max_tokens=40, ignore_eos=True)
    assert (exact.json["usage"]["completion_tokens"], choice_of(exact)["finish_reason"]) == (40, "length")
    longer = ask(client, QUESTION, temperature=0, max_tokens=40, min_tokens=ended + 5)
    assert ended + 5 <= longer.json["usage"]["completion_tokens"] <= 40
    wrong = ask(client, QUESTION, min_tokens=-1)
    assert (wrong.status_code, wrong.json["error"]["param"]) == (400, "min_tokens")
    for most in ({"max_tokens": 5}, {}):  # what cannot be met is said, and not left out
        wrong = ask(client, QUESTION, min_tokens=6 if most else 100_000, **most)
        assert (wrong.status_code, wrong.json["error"]["param"]) == (400, "min_tokens")
        assert "must be at most" in wrong.json["error"]["message"]
