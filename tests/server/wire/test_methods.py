"""Interventions that are a file and a line, over HTTP: as the library has them, and refused in the project's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from steering.interventions.dola import Dola
from steering.interventions.look_at import LookAt
from steering.interventions.project_out import ProjectOut
from steering.interventions.published.agla import Agla
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only
from steering.interventions.published.opera import Opera
from steering.interventions.published.vista import Vista
from tests.server.conftest import ask, data_uri

QUESTION = "What colour is the star?"
PICTURE = Image.new("RGB", (84, 84), "red")


def in_the_library(engine: steering.Engine, *asked: steering.Options) -> tuple[str, Any]:
    """Return the library's answer, and the interventions that it reports as applied."""
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": QUESTION}]
    sampling = steering.Sampling(max_tokens=6)
    request = steering.Request([{"role": "user", "content": content}], sampling, asked)
    completion = engine.submit(steering.decide(engine, request))
    choice = completion.result().choices[0]
    return choice.text, choice.applied


def over_http(client: FlaskClient, **fields: Any) -> tuple[str, Any]:
    """Return the server's answer, and the interventions that it reports as applied."""
    response = ask(client, data_uri(PICTURE), QUESTION, max_tokens=6, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json["choices"]
    return choice["message"]["content"], choice["applied"]


def nearly(applied: Any) -> Any:
    """Return the report to compare with, its numbers up to rounding."""
    return {
        path: {name: pytest.approx(value) if isinstance(value, float) else value for name, value in said.items()}
        for path, said in applied.items()
    }


@pytest.mark.parametrize("value", [True, {"layers": [0, 3], "tokens": "image"}])
def test_a_direction_is_projected_out_by_its_vectors_name(
    value: Any, client: FlaskClient, engine: steering.Engine, vectors: Path
) -> None:
    vector = steering.VectorStore(vectors).get("modality-preference")
    options = {} if value is True else value
    text, applied = in_the_library(engine, ProjectOut(vector=vector, **options))
    assert over_http(client, project_out=value) == (text, nearly(applied))
    assert applied["project_out"]["vector"] == "modality-preference"
    assert applied["project_out"]["removed"] > 0


@pytest.mark.parametrize("value", [True, {"box": [0, 0, 0.5, 1], "bias": 6, "layers": [1], "heads": [0, 2]}])
def test_a_picture_or_a_box_is_looked_at(value: Any, client: FlaskClient, engine: steering.Engine) -> None:
    options = {} if value is True else value
    text, applied = in_the_library(engine, LookAt(**options))
    assert over_http(client, look_at=value) == (text, applied)
    patches, layers = (9, [2, 3, 4]) if value is True else (6, [1])
    assert (applied["look_at"]["patches"], applied["look_at"]["layers"]) == (patches, layers)


@pytest.mark.parametrize("value", [True, {"premature": [0, 3, 6], "relative_top": 0.3, "normalise": True}])
def test_early_layers_are_contrasted(value: Any, client: FlaskClient, engine: steering.Engine) -> None:
    options = {} if value is True else value
    text, applied = in_the_library(engine, Dola(**options))
    assert over_http(client, dola=value) == (text, applied)
    assert sum(applied["dola"]["chosen"].values()) > 0
    assert applied["dola"]["premature"] == options.get("premature", [2])


@pytest.mark.parametrize("options", [{}, {"forgetting": 0.3, "threshold": 1.0, "first_step": 0, "beta": 0.1}])
def test_the_logits_move_away_from_those_without_pictures(
    options: dict[str, Any], client: FlaskClient, engine: steering.Engine
) -> None:
    text, applied = in_the_library(engine, M3id(**options))
    assert over_http(client, contrast={"kind": "m3id", **options}) == (text, applied)
    assert applied["contrast"]["forgetting"] == options.get("forgetting", 0.02)


@pytest.mark.parametrize("value", [True, {"layer": 3, "gamma": 2.0, "collaborate": 1, "beta": 0.3}])
def test_one_layers_attention_to_the_text_is_contrasted(
    value: Any, client: FlaskClient, engine: steering.Engine
) -> None:
    options = {} if value is True else value
    text, applied = in_the_library(engine, Only(**options))
    assert over_http(client, only=value) == (text, applied)
    assert applied["only"]["collaborative"] + applied["only"]["contrastive"] > 0
    assert applied["only"]["layer"] == options.get("layer", 0)


@pytest.mark.parametrize("value", [True, {"strength": 0.05, "place": "residual", "window": [2, 5], "alpha": 0.4}])
def test_vectors_of_the_pictures_are_measured_and_added(
    value: Any, client: FlaskClient, engine: steering.Engine
) -> None:
    options = {} if value is True else value
    text, applied = in_the_library(engine, Vista(**options))
    assert over_http(client, vista=value) == (text, nearly(applied))
    assert applied["vista"]["window"] == options.get("window", [1, 2, 3, 4, 5, 6])
    assert applied["vista"]["length"] > 0


@pytest.mark.parametrize(
    "value", [True, {"scale": 300.0, "candidates": 2, "penalty": 3, "threshold": 1, "rollbacks": 2}]
)
def test_candidates_are_penalised_by_their_attention(value: Any, client: FlaskClient, engine: steering.Engine) -> None:
    options = {} if value is True else value
    text, applied = in_the_library(engine, Opera(**options))
    assert over_http(client, opera=value) == (text, applied)
    assert applied["opera"]["trusted"][0] == 0
    assert applied["opera"]["rolled_back"] == []


@pytest.mark.parametrize("options", [{}, {"alpha": 0.5, "beta": 0.1, "keep": 0.4}])
def test_the_logits_of_the_salient_parts_are_added(
    options: dict[str, Any], client: FlaskClient, engine: steering.Engine
) -> None:
    text, applied = in_the_library(engine, Agla(**options))
    assert over_http(client, contrast={"kind": "agla", **options}) == (text, applied)
    assert applied["contrast"]["saliency"] == "attention"
    assert len(applied["contrast"]["masked"][0]) == (5 if options else 2), "of nine patches"


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        (
            {"project_out": {"vector": "nobody"}},
            "project_out.vector",
            "unknown_vector",
            "There is no steering vector 'nobody'",
        ),
        ({"project_out": {"vector": "stranger"}}, "project_out.vector", "wrong_model", "was made for a model with"),
        ({"project_out": {"vector": 7}}, "project_out.vector", "invalid_value", "must be a string; got 7."),
        (
            {"project_out": {"tokens": "pictures"}},
            "project_out.tokens",
            "invalid_value",
            "must be one of all, prompt, generated, image, text, or image:1, image:2 and so on for one image; "
            "got 'pictures'.",
        ),
        (
            {"look_at": {"box": [0, 0, 0, 1]}},
            "look_at.box",
            "invalid_value",
            "must be [x0, y0, x1, y1] with x0 < x1 and y0 < y1; got [0.0, 0.0, 0.0, 1.0].",
        ),
        (
            {"dola": {"premature": [8]}},
            "dola.premature",
            "invalid_value",
            "must be different numbers from 0, the embeddings, to 7",
        ),
        ({"dola": {"bucket": "mid"}}, "dola.bucket", "invalid_value", "must be one of low, high; got 'mid'."),
        (
            {"vista": {"layers": [8]}},
            "vista.layers",
            "invalid_value",
            "must be different layer numbers from 0 to 7; got [8].",
        ),
        ({"only": {"layer": 8}}, "only.layer", "invalid_value", "must be below 8, the model's layers; got 8."),
        ({"look_at": {"bias": 50}}, "look_at.bias", "invalid_value", "must be from -20 to 20; got 50"),
        ({"look_at": {"image": 2}}, "look_at.image", "invalid_value", "the request holds 1 image."),
        ({"look_at": {"heads": [6]}}, "look_at.heads", "invalid_value", "from 0 to 5; got [6]."),
        ({"project_out": {"tokens": "image:2"}}, "project_out.tokens", "invalid_value", "the request holds 1 image."),
        (
            {"project_out": {"layers": [8]}},
            "project_out.layers",
            "invalid_value",
            "must be different layer numbers from 0 to 7; got [8].",
        ),
    ],
)
def test_what_is_wrong_is_said(
    fields: dict[str, Any], param: str, code: str, message: str, client: FlaskClient
) -> None:
    response = ask(client, data_uri(PICTURE), QUESTION, **fields)
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert message in error["message"]
