"""A dry run says what would be applied, and refuses what a chat would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient

import steering
from tests.server.conftest import ask, data_uri
from tests.server.vectors.uploads import QUESTION, MakeVector, problem, upload, validate


def test_a_dry_run_says_what_would_be_applied(
    open_client: FlaskClient, make_vector: MakeVector, engine: steering.Engine
) -> None:
    ones = torch.ones(engine.mllm.num_layers, engine.mllm.hidden_size)
    vector = make_vector(
        direction=ones * 0.5,
        weight=torch.full((engine.mllm.num_layers,), 3.0),
        mean_abs=torch.full((engine.mllm.num_layers,), 0.25),
        info={"calibration": {"range": [0.5, 1.5]}},
    )
    upload(open_client, vector)
    response = validate(open_client, steering={"vector": "mine", "strength": 2, "apply": {"tokens": "image"}})
    assert response.status_code == 200
    norm = 3.0 * engine.mllm.hidden_size**0.5
    added = [{"layer": layer, "norm": pytest.approx(norm), "largest": 3.0, "relative": 12.0} for layer in (1, 2)]
    assert {name: response.json[name] for name in ("object", "model", "steering")} == {
        "object": "steering.validation",
        "model": engine.mllm.name,
        "steering": [
            {
                "name": "mine",
                "digest": vector.identity,
                "toward": "vision",
                "strength": 2.0,
                "published": None,
                "scale": -2.0,
                "layers": [1, 2],
                "apply": {"tokens": "image"},
                "calibrated_range": [0.5, 1.5],
                "warning": "strength 2 is beyond the calibrated range 0.5 to 1.5",
                "added": added,
            }
        ],
    }
    # As a chat reports it.
    answer = ask(
        open_client, data_uri(), QUESTION, steering={"vector": "mine", "strength": 2, "apply": {"tokens": "image"}}
    )
    (applied,) = answer.json["choices"][0]["applied"]["steering"]
    shared = applied.keys() & response.json["steering"][0].keys()
    assert shared >= {"name", "toward", "strength", "scale", "layers", "apply", "warning"}
    assert all(applied[key] == response.json["steering"][0][key] for key in shared)


def test_a_dry_run_of_several_vectors_and_of_none(open_client: FlaskClient) -> None:
    named = {"name": "modality-preference", "scale": -0.5, "layers": [2]}
    response = validate(open_client, steering={"vectors": [named, {**named, "scale": 1.0}]})
    assert [(one["scale"], one["toward"], one["layers"]) for one in response.json["steering"]] == [
        (-0.5, None, [2]),
        (1.0, None, [2]),
    ]
    for nothing in (False, None, {"vectors": []}):
        assert validate(open_client, steering=nothing).json["steering"] == []


def test_a_dry_run_leaves_the_way_of_auto_open(open_client: FlaskClient) -> None:
    (report,) = validate(open_client, steering={"toward": "auto", "strength": 0.5}).json["steering"]
    assert (report["toward"], report["strength"], report["scale"]) == ("auto", 0.5, None)
    surprise = {"toward": "auto", "auto": {"criterion": "surprise", "bound": 2.0, "one_degraded": True}}
    assert validate(open_client, steering=surprise).status_code == 200
    for auto in ({"bound": 2.0}, {"criterion": "surprise", "bound": -1}):
        refused = validate(open_client, steering={"toward": "auto", "auto": auto})
        assert (refused.status_code, problem(refused)[2]) == (400, "steering.auto.bound")


def test_a_dry_run_takes_a_whole_chat_request_and_counts_its_images(make_app: Callable[..., Flask]) -> None:
    open_client = make_app(allow_remote_images=True).test_client()
    content = [{"type": "image_url", "image_url": {"url": "https://host.invalid/a.png"}}] * 2
    messages = [{"role": "user", "content": content}]
    for number, status in ((2, 200), (3, 400)):
        steering = {"apply": {"tokens": f"image:{number}"}}
        assert validate(open_client, steering=steering, messages=messages).status_code == status
    assert problem(validate(open_client, steering=steering, messages=messages))[2] == "steering.apply.tokens"
    assert validate(open_client, steering=steering).status_code == 200


@pytest.mark.parametrize(
    "steering",
    [
        {"vector": "nobody"},
        {"vector": "../modality-preference"},
        {"vector": "damaged"},
        {"vector": "stranger"},
        {"strength": 99},
        {"strength": -1},
        {"strength": "much"},
        {"toward": "left"},
        {"layers": [99]},
        {"layers": [1, 1]},
        {"apply": {"tokens": "some"}},
        {"apply": {"tokens": "image:0"}},
        {"apply": {"token": "all"}},
        {"vectors": [{"name": "modality-preference", "scale": 99}] * 2},
        {"vectors": [{"name": "modality-preference"}] * 9},
        {"vectors": [{}]},
        "on",
    ],
)
def test_errors_of_a_dry_run_are_those_of_a_chat(steering: Any, open_client: FlaskClient) -> None:
    chat, dry = ask(open_client, steering=steering), validate(open_client, steering=steering)
    assert (dry.status_code, dry.json) == (chat.status_code, chat.json)
    assert dry.status_code == 400


def test_a_dry_run_refuses_the_remote_image_that_a_chat_refuses(open_client: FlaskClient) -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://host.invalid/a.png"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    chat, dry = open_client.post("/v1/chat/completions", json=body), validate(open_client, **body)
    assert (dry.status_code, dry.json) == (chat.status_code, chat.json)
    assert problem(dry)[:2] == (400, "remote_images_disabled")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"apply": {"tokens": "some"}}, "apply.tokens"),
        ({"apply": {"tokens": "image:2"}}, "apply.tokens"),
        ({"apply": {"token": "all"}}, "apply.token"),
        ({"layers": [99]}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": []}, "layers"),
        ({"name": "nobody"}, "name"),
        ({"name": "stranger"}, "name"),
        ({"scale": 99}, "scale"),
    ],
)
def test_what_is_wrong_with_one_vector_of_several_names_it(
    wrong: dict[str, Any], param: str, open_client: FlaskClient
) -> None:
    vectors = [{"name": "modality-preference"}, {"name": "modality-preference", **wrong}]
    response = ask(open_client, data_uri(), QUESTION, steering={"vectors": vectors})
    assert (response.status_code, response.json["error"]["param"]) == (400, f"steering.vectors[1].{param}")
    message = response.json["error"]["message"]
    assert "'steering." not in message.replace("'steering.vectors[1].", "")
    content = [{"type": "image_url", "image_url": {"url": data_uri()}}]
    dry = validate(open_client, steering={"vectors": vectors}, messages=[{"role": "user", "content": content}])
    assert dry.json == response.json


def test_a_dry_run_needs_a_body_and_the_right_model(open_client: FlaskClient) -> None:
    assert validate(open_client).json["steering"] == []
    assert problem(validate(open_client, steering=True, model="gpt-4o")) == (404, "model_not_found", "model")
    for body in (b"[1]", b"{", b""):
        response = open_client.post("/v1/steering/validate", data=body, content_type="application/json")
        assert problem(response) == (400, "invalid_json", None)
    assert open_client.post("/v1/steering/validate", data=b"x", content_type="text/plain").status_code == 415


def test_an_image_that_a_chat_does_not_have_is_refused(open_client: FlaskClient) -> None:
    response = ask(open_client, data_uri(), QUESTION, steering={"apply": {"tokens": "image:2"}})
    assert problem(response) == (400, "invalid_value", "steering.apply.tokens")
    response = ask(open_client, data_uri(), QUESTION, steering={"apply": {"tokens": "image:1"}})
    assert response.json["choices"][0]["applied"]["steering"][0]["apply"] == {"tokens": "image:1"}
