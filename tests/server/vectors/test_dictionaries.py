"""Sparse dictionaries over HTTP: listed, steered by, and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flask.testing import FlaskClient
from safetensors.torch import load_file, save_file

import steering
from server.app import create_app
from server.settings import Settings
from steering.vectors.sparse import SparseDictionary
from tests.server.api.test_states import QUESTION, plain_states
from tests.server.conftest import ask, data_uri
from tests.steering.vectors.made import dictionary

LAYER = 4


@pytest.fixture
def made(engine: steering.Engine, tmp_path: Path) -> SparseDictionary:
    return dictionary(tmp_path / "layer4", engine.mllm.hidden_size, LAYER)


@pytest.fixture
def client(engine: steering.Engine, tmp_path: Path) -> FlaskClient:
    return create_app(Settings(vectors=(str(tmp_path),)), engine=engine).test_client()


def test_dictionaries_are_listed(client: FlaskClient, made: SparseDictionary, tmp_path: Path) -> None:
    dictionary(tmp_path / "other", 8)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("cfg.json", "sae_weights.safetensors"):
        (broken / name).write_text("{}")
    listed: Any = client.get("/v1/steering/vectors").json
    damaged, own, other = listed["dictionaries"]
    assert own == {
        **{"name": "layer4", "layer": LAYER, "width": made.width, "features": 40, "architecture": "standard"},
        **{"model": None, "matches": True},
    }
    assert other["matches"] is False
    assert "it is of 'None', not of the residual stream" in damaged["error"]


def test_dictionaries_that_cannot_be_used_are_listed_with_their_error(
    client: FlaskClient, made: SparseDictionary, tmp_path: Path
) -> None:
    infinite = dictionary(tmp_path / "infinite", made.width, LAYER)
    tensors = load_file(Path(infinite.folder) / "sae_weights.safetensors")
    tensors["W_enc"][1, 2] = torch.nan
    save_file(tensors, Path(infinite.folder) / "sae_weights.safetensors")
    dictionary(tmp_path / "My Dictionary", made.width, LAYER)
    dictionary(tmp_path / "weightless", made.width, LAYER)
    (tmp_path / "weightless" / "sae_weights.safetensors").unlink()
    (tmp_path / "previous").mkdir()  # a folder without any file of a dictionary is none
    listed: Any = client.get("/v1/steering/vectors").json
    errors = {card["name"]: card.get("error", "") for card in listed["dictionaries"]}
    assert errors.pop("layer4") == ""
    assert "its W_enc holds numbers that are not finite" in errors.pop("infinite")
    assert "its folder's name does not match" in errors.pop("My Dictionary")
    assert "it has no sae_weights.safetensors" in errors.pop("weightless")
    assert errors == {}
    refused = ask(client, QUESTION, steering={"when": {"vector": "sae:infinite/2"}})
    assert (refused.status_code, refused.json["error"]["code"]) == (400, "bad_dictionary")


def test_a_feature_is_held_to_the_magnitudes_that_it_adds(
    client: FlaskClient, made: SparseDictionary, engine: steering.Engine
) -> None:
    """It has no published weight; scale 6 of a small row is little beside the states, and 1000 times the limit is not."""
    size = float(made.direction(5).abs().mean() / steering.magnitudes(engine)[LAYER])
    assert 6 * size < 6, "the row is small beside the states"
    for scale, status in ((6.0, 200), (5.9 / size, 200), (6.1 / size, 400)):
        asked = {"steering": {"vectors": [{"name": "sae:layer4/5", "scale": scale}]}, "max_tokens": 1}
        response = ask(client, data_uri(), QUESTION, **asked)
        assert response.status_code == status, (scale, response.text)
    error = response.json["error"]
    assert (error["code"], error["param"]) == ("steering_strength_exceeded", "steering.vectors[0].scale")
    assert f"must be at most {6 / size:.3g} in size for 'sae:layer4/5'" in error["message"]
    assert "published" not in error["message"]


def test_a_feature_at_another_layer_was_not_calibrated(client: FlaskClient, made: SparseDictionary) -> None:
    response = ask(client, QUESTION, steering={"when": {"vector": "sae:layer4/5", "layer": 2}})
    error = response.json["error"]
    assert (response.status_code, error["param"]) == (400, "steering.when.above")
    assert "'sae:layer4/5' is a feature of a dictionary at layer 4" in error["message"]
    assert "calibrated" not in error["message"]


def test_a_request_steers_by_a_feature_and_reads_it(
    client: FlaskClient, made: SparseDictionary, engine: steering.Engine
) -> None:
    """The only dictionary needs no name. Steering adds its row to the state that is read."""
    chosen = {"include": ["features"], "features": {"ids": [5]}}
    vectors = [{"name": "sae:layer4/5", "scale": 4.0}]
    request: dict[str, Any] = {
        "max_tokens": 1,
        "diagnostics": chosen,
        "steering": {"vectors": vectors},
        "baseline": True,
    }
    answer: Any = ask(client, data_uri(), QUESTION, **request).json
    (choice,) = answer["choices"]
    (applied,) = choice["applied"]["steering"]
    assert (applied["name"], applied["layers"], applied["scale"]) == ("sae:layer4/5", [LAYER], 4.0)
    state = plain_states(engine)[LAYER]
    for report, added in ((choice["baseline"], 0.0), (choice, 4.0 * made.direction(5))):
        features = report["diagnostics"]["features"]
        expected = made.encode(state + torch.as_tensor(added))[5]
        assert features["dictionary"] == "layer4"
        assert features["features"][0]["mean"] == pytest.approx(float(expected), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        (
            {"steering": {"vectors": [{"name": "sae:layer4/40", "scale": 1}]}},
            "steering.vectors[0].name",
            "unknown_vector",
        ),
        (
            {"steering": {"vectors": [{"name": "sae:x/1", "scale": 1}]}},
            "steering.vectors[0].name",
            "unknown_dictionary",
        ),
        ({"project_out": {"vector": "sae:layer4/99"}}, "project_out.vector", "unknown_vector"),
        ({"steering": {"vector": "sae:layer4/1", "toward": "text"}}, "steering.vector", "not_a_preference"),
        (
            {"steering": {"when": {"vector": "sae:layer4/1", "layer": 2, "above": 0, "measure": "feature"}}},
            "steering.when.measure",
            None,
        ),
        (
            {"steering": {"when": {"vector": "modality-preference", "above": 0, "measure": "feature"}}},
            "steering.when.measure",
            None,
        ),
        (
            {"diagnostics": {"include": ["features"], "features": {"dictionary": "x"}}},
            "diagnostics.features.dictionary",
            "unknown_dictionary",
        ),
        (
            {"diagnostics": {"include": ["features"], "features": {"dictionary": "../outside/layer4"}}},
            "diagnostics.features.dictionary",
            "unknown_dictionary",
        ),
        ({"diagnostics": {"include": ["features"], "features": {"ids": [40]}}}, "diagnostics.features.ids", None),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    asked: dict[str, Any], param: str, code: str | None, client: FlaskClient, made: SparseDictionary
) -> None:
    response = ask(client, QUESTION, **asked)
    assert (response.status_code, response.json["error"]["param"]) == (400, param)
    assert code is None or response.json["error"]["code"] == code


def test_a_feature_is_removed_from_the_states(
    client: FlaskClient, made: SparseDictionary, engine: steering.Engine
) -> None:
    asked = {
        "project_out": {"vector": "sae:layer4/5"},
        "diagnostics": {"include": ["features"], "features": {"ids": [5]}},
    }
    answer: Any = ask(client, data_uri(), QUESTION, max_tokens=1, **asked).json
    row, state = made.direction(5), plain_states(engine)[LAYER]
    without = state - (state @ row) / (row @ row) * row
    (feature,) = answer["choices"][0]["diagnostics"]["features"]["features"]
    assert feature["mean"] == pytest.approx(float(made.encode(without)[5]), rel=1e-3, abs=1e-3)


def test_a_gate_opens_where_a_feature_is_active(
    client: FlaskClient, made: SparseDictionary, engine: steering.Engine
) -> None:
    """One of the features is active in the prompt's state and another is not; steering follows the former alone."""
    activations = made.encode(plain_states(engine)[LAYER])
    active, inactive = int(activations.argmax()), int((activations == 0).nonzero()[0])
    least = float(activations[active])
    for when, opens in (
        ({"vector": f"sae:layer4/{active}"}, True),
        ({"vector": f"sae:layer4/{active}", "above": least - 0.1}, True),
        ({"vector": f"sae:layer4/{active}", "above": least + 0.1}, False),
        ({"vector": f"sae:layer4/{active}", "below": least + 0.1, "measure": "feature"}, True),
        ({"vector": f"sae:layer4/{inactive}"}, False),
    ):
        asked = {"vectors": [{"name": "sae:layer4/5", "scale": 4.0}], "when": when}
        answer: Any = ask(client, data_uri(), QUESTION, max_tokens=1, steering=asked).json
        (applied,) = answer["choices"][0]["applied"]["steering"]
        (term,) = applied["gate"]["terms"]
        assert (applied["gate"]["open"], applied["scale"]) == (opens, 4.0 if opens else 0.0)
        assert (term["measure"], term["layer"]) == ("feature", LAYER)
        expected = least if f"/{active}" in str(when["vector"]) else 0.0
        assert term["value"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
