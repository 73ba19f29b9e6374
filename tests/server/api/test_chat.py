"""POST /v1/chat/completions on the real engine: answers, interventions, diagnostics, and requests that are wrong."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine

QUESTION = "What is the background colour?"


def choice_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json["choices"][0]
    return choice


def refused(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json) == {"error"}
    error: dict[str, Any] = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


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


def test_steering_is_reported_as_applied(client: FlaskClient) -> None:
    choice = choice_of(ask(client, data_uri(), QUESTION, steering={"toward": "text", "strength": 0.5}))
    (applied,) = choice["applied"]["steering"]
    assert applied["name"] == "modality-preference"
    assert (applied["toward"], applied["scale"], applied["layers"]) == ("text", 0.5, [1, 2])


def test_strength_zero_is_exactly_off_and_still_reported(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), QUESTION))
    off = choice_of(ask(client, data_uri(), QUESTION, steering={"strength": 0}))
    assert off["message"] == plain["message"]
    assert off["applied"]["steering"][0]["scale"] == 0


def test_an_empty_list_of_vectors_is_reported_as_such(client: FlaskClient) -> None:
    assert choice_of(ask(client, QUESTION, steering={"vectors": []}))["applied"] == {"steering": []}


def test_steering_false_is_no_steering(client: FlaskClient) -> None:
    assert "applied" not in choice_of(ask(client, QUESTION, steering=False))


def test_sage_is_reported_stage_by_stage(client: FlaskClient) -> None:
    sage = {"see": {"alpha": 0.2}, "think": {"threshold": 0.1, "gamma": 0.8}, "generate": {"lambda": 1.0}}
    applied = choice_of(ask(client, data_uri(), QUESTION, sage=sage))["applied"]
    assert set(applied) == {"sage"}
    see, think, generate = (applied["sage"][stage] for stage in ("see", "think", "generate"))
    assert see["share_after"] > see["share_before"] > 0
    assert see["alpha_max"] == pytest.approx([0.2] * len(see["alpha"]))  # that of the shallow layers
    assert len(think["suppressed"]) == 8
    assert all(
        (share > 0) >= (mean > 0.1) for share, mean in zip(think["suppressed"], think["divergence"], strict=True)
    )
    assert generate["masking"] == "pixels"
    assert 1 <= len(generate["masked"][0]) <= 2  # a fifth of nine patches
    alone = choice_of(ask(client, data_uri(), QUESTION, sage={"think": False, "generate": False}, steering=True))
    assert (alone["applied"]["sage"]["think"], alone["applied"]["sage"]["generate"]) == (None, None)
    assert alone["applied"]["steering"]


def test_automatic_steering_follows_the_modality_that_carries_the_answer(client: FlaskClient) -> None:
    context = "Text context: The circle is green."
    choice = choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering={"toward": "auto"}))
    (applied,) = choice["applied"]["steering"]
    numbers = applied["auto"]
    assert applied["toward"] == ("vision" if numbers["drop_vision"] >= numbers["drop_text"] else "text")
    assert numbers["drop_text"] == pytest.approx(numbers["answer"] - numbers["without_context"])
    assert 0 < numbers["answer"] <= 1
    stated = {"toward": applied["toward"]}
    assert choice["message"] == choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering=stated))["message"]


DAMAGED = "Text context: crilce qoe gxrae."


def surprised(client: FlaskClient, context: str, **fields: Any) -> dict[str, Any]:
    auto = {"criterion": "surprise", **fields.pop("auto", {})}
    steering = {"toward": "auto", "auto": auto}
    return choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering=steering, **fields))


def test_a_surprising_text_is_steered_away_from(client: FlaskClient, engine: steering.Engine) -> None:
    calibrated = engine.mllm.calibration
    assert calibrated is not None
    choice = surprised(client, DAMAGED)
    (applied,) = choice["applied"]["steering"]
    assert (applied["toward"], applied["strength"]) == ("vision", 1.0)
    found = applied["auto"]
    assert set(found) == {"criterion", "surprise", "bound", "contexts", "one_degraded", "abstained"}
    assert (found["criterion"], found["bound"], found["abstained"]) == ("surprise", calibrated.surprise, None)
    assert found["surprise"] > found["bound"]
    stated = ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}", steering={"toward": "vision"})
    assert choice["message"] == choice_of(stated)["message"]


def test_within_the_bound_nothing_is_steered_unless_one_modality_is_degraded(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}"))
    abstaining = surprised(client, DAMAGED, auto={"bound": 1000})
    (applied,) = abstaining["applied"]["steering"]
    assert (applied["toward"], applied["strength"]) == (None, 0.0)
    assert "is within the bound of 1000" in applied["auto"]["abstained"]
    assert abstaining["message"] == plain["message"]
    (applied,) = surprised(client, DAMAGED, auto={"bound": 1000, "one_degraded": True})["applied"]["steering"]
    assert (applied["toward"], applied["auto"]["abstained"]) == ("text", None)


def test_surprise_of_several_contexts_and_answers_with_their_baselines(client: FlaskClient) -> None:
    text = f"{DAMAGED}\nText context: The circle is red.\n{QUESTION}"
    steered = {"toward": "auto", "auto": {"criterion": "surprise"}}
    response = ask(client, data_uri(), text, steering=steered, n=2, baseline=True)
    assert len(response.json["choices"]) == 2
    for choice in response.json["choices"]:
        (applied,) = choice["applied"]["steering"]
        assert (applied["toward"], applied["auto"]["contexts"]) == ("vision", 2)
        assert choice["baseline"]["message"] == choice_of(ask(client, data_uri(), text))["message"]


def test_surprise_of_a_stream_in_a_chat_of_several_turns(client: FlaskClient) -> None:
    context = {"type": "text", "text": DAMAGED, "span": "context"}
    first = {"role": "user", "content": [*user(data_uri())["content"], context]}
    chat = [first, {"role": "assistant", "content": "I see."}, user(QUESTION)]
    fields = {"messages": chat, "steering": {"toward": "auto", "auto": {"criterion": "surprise"}}}
    whole = choice_of(ask(client, **fields))
    (applied,) = whole["applied"]["steering"]
    assert (applied["toward"], applied["auto"]["contexts"]) == ("vision", 1)
    lines = ask(client, **fields, stream=True).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
    assert pieces[-1]["applied"] == whole["applied"]


def test_a_model_that_was_not_calibrated_is_told_the_command(
    client: FlaskClient, engine: steering.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.mllm, "calibration", None)
    asked = {"toward": "auto", "auto": {"criterion": "surprise"}}
    error = refused(ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}", steering=asked))
    assert error["param"] == "steering.auto.bound"
    assert "'helmsight probe --calibrate-surprise'" in error["message"]
    assert surprised(client, DAMAGED, auto={"bound": 1})["applied"]["steering"][0]["auto"]["bound"] == 1


@pytest.mark.parametrize("kind", ["vcd", "icd", "pai"])
def test_a_contrast_is_reported(client: FlaskClient, kind: str) -> None:
    applied = choice_of(ask(client, data_uri(), QUESTION, contrast={"kind": kind, "alpha": 0.5}, logprobs=True))
    assert set(applied["applied"]) == {"contrast"}
    report = applied["applied"]["contrast"]
    assert (report["kind"], report["alpha"], report["beta"]) == (kind, 0.5, 0.1)
    assert 0 <= report["changed"] <= len(applied["logprobs"]["content"])


@pytest.mark.parametrize("contrast", [{"kind": "vcd"}, {"kind": "pai"}])
def test_a_contrast_that_needs_an_image_is_refused_without(client: FlaskClient, contrast: dict[str, Any]) -> None:
    response = ask(client, QUESTION, contrast=contrast)
    assert (response.status_code, response.json["error"]["param"]) == (400, "contrast")


@pytest.mark.parametrize(
    ("sage", "param"),
    [
        ({"see": {"alpha": 9}}, "sage.see.alpha"),
        ({"see": {"reading": "aloud"}}, "sage.see.reading"),
        ({"see": {"spans": "none"}}, "sage.see.spans"),
        ({"generate": {"lambda": -1}}, "sage.generate.lambda"),
        ({"generate": {"refresh": -1}}, "sage.generate.refresh"),
    ],
)
def test_a_stage_that_is_out_of_range_is_named(client: FlaskClient, sage: dict[str, Any], param: str) -> None:
    response = ask(client, data_uri(), QUESTION, sage=sage)
    assert (response.status_code, response.json["error"]["param"]) == (400, param)


def test_sage_without_an_image_is_refused(client: FlaskClient) -> None:
    response = ask(client, QUESTION, sage={"think": False})
    assert (response.status_code, response.json["error"]["param"]) == (400, "sage.see")


def test_the_long_form_takes_layers_and_tokens(client: FlaskClient) -> None:
    vector = {"name": "modality-preference", "coefficient": -1.0, "layers": [3], "apply": {"tokens": "image"}}
    (applied,) = choice_of(ask(client, data_uri(), QUESTION, steering={"vectors": [vector]}))["applied"]["steering"]
    assert (applied["scale"], applied["layers"]) == (-1.0, [3])


def test_baseline_is_the_unsteered_answer(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), QUESTION))
    steered = choice_of(ask(client, data_uri(), QUESTION, steering={"strength": 4}, baseline=True))
    assert steered["baseline"]["message"] == plain["message"]


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
    (model,) = client.get("/v1/models").json["data"]
    for name in model["readouts"]:
        response = ask(client, data_uri(), QUESTION, diagnostics={"include": [name]})
        assert response.status_code == 200, name
        has_key = name in response.json["choices"][0]["diagnostics"]
        assert has_key or name == "decay_layers"


def test_too_many_maps_are_refused_with_the_bound(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steering.protocol.readout.MAX_VALUES", 10)
    response = ask(client, data_uri(), QUESTION, diagnostics={"include": ["tam"]})
    assert (response.status_code, response.json["error"]["code"]) == (400, "too_many_maps")
    assert "at most 10 numbers" in response.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"steering": {"vector": "nobody"}}, "steering.vector", "unknown_vector"),
        ({"steering": {"vector": "../modality-preference"}}, "steering.vector", "unknown_vector"),
        ({"steering": {"vector": "damaged"}}, "steering.vector", "bad_vector"),
        ({"steering": {"vector": "stranger"}}, "steering.vector", "wrong_model"),
        ({"steering": {"toward": "auto"}}, "steering.toward", "invalid_value"),
        ({"steering": {"toward": "auto", "strength": 9}}, "steering.strength", "steering_strength_exceeded"),
        ({"steering": {"toward": "auto", "auto": {"criterion": "surprise"}}}, "steering.toward", "invalid_value"),
        ({"steering": {"toward": "auto", "auto": {"bound": 1}}}, "steering.auto.bound", "invalid_value"),
        ({"steering": {"strength": 4.1}}, "steering.strength", "steering_strength_exceeded"),
        ({"steering": {"strength": -1}}, "steering.strength", "invalid_value"),
        ({"steering": {"layers": [99]}}, "steering.layers", "invalid_value"),
        ({"steering": {"apply": {"tokens": "some"}}}, "steering.apply.tokens", "invalid_value"),
        (
            {"steering": {"vectors": [{"name": "modality-preference", "scale": 3}] * 2}},
            "steering.vectors",
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
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"max_tokens": 100_000}, "messages", "context_length_exceeded"),
    ],
)
def test_what_cannot_be_applied_is_refused(client: FlaskClient, fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(ask(client, data_uri(), QUESTION, **fields))
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


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
    response = client.get("/v1/chat/completions")
    refused(response, 405)
    assert "POST" in response.headers["Allow"]
    refused(client.get("/v1//models"), 404)
