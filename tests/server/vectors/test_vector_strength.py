"""A strength is told in published units, in which it has its limit, whatever a vector was composed of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from flask.testing import FlaskClient

from steering import SteeringVector
from tests.server.conftest import ask, data_uri
from tests.server.vectors.uploads import QUESTION, ROUTE, MakeVector, problem, upload, validate


def test_a_strength_is_told_in_both_units(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    shown = upload(open_client, calibrated).json
    assert shown["published"] == pytest.approx(0.4)
    for body in ({"vector": "mine", "strength": 2.0}, {"vectors": [{"name": "mine", "scale": -2.0}]}):
        (planned,) = validate(open_client, steering=body).json["steering"]
        (applied,) = ask(open_client, data_uri(), QUESTION, steering=body).json["choices"][0]["applied"]["steering"]
        for report in (planned, applied):
            assert (report["strength"], report["published"]) == (2.0, pytest.approx(0.8))
            assert report["warning"] == "strength 2 is beyond the calibrated range 0.5 to 1"  # in the vector's own unit


def test_the_limit_is_in_published_units(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    limits = open_client.get("/v1/models").json["data"][0]["limits"]
    assert (limits["strength"], limits["strength_unit"]) == (4.0, "published")
    upload(open_client, calibrated)
    for strength, status in ((7.5, 200), (10.0, 200), (10.01, 400)):  # 3, 4 and a little more than 4 published
        response = validate(open_client, steering={"vector": "mine", "strength": strength})
        assert response.status_code == status, strength
    assert problem(response) == (400, "steering_strength_exceeded", "steering.strength")
    said = "must be at most 10 in size for 'mine', whose strength 1 is 0.4 in published units (at most 4)"
    assert said in response.json["error"]["message"]


def test_toward_is_kept_by_a_vector_that_was_negated(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    upload(open_client, (-0.5 * calibrated).named("half"))
    shown = open_client.get(f"{ROUTE}/half").json
    assert (shown["kind"], shown["positive"]) == ("modality-preference", "vision")
    upload(open_client, calibrated)
    assert open_client.get(f"{ROUTE}/mine").json["positive"] == "text"
    for toward, scale in (("text", -2.0), ("vision", 2.0)):
        body = {"vector": "half", "toward": toward, "strength": 2}
        answer = ask(open_client, data_uri(), QUESTION, steering=body)
        (applied,) = answer.json["choices"][0]["applied"]["steering"]
        assert (applied["toward"], applied["scale"], applied["published"]) == (toward, scale, pytest.approx(0.4))
        assert validate(open_client, steering=body).json["steering"][0]["scale"] == scale
        counted = f'helmsight_interventions_total{{kind="steering",toward="{toward}"}} 1.0'
        assert counted in open_client.get("/metrics").text
        whole = ask(open_client, data_uri(), QUESTION, steering={"vector": "mine", "toward": toward})
        assert answer.json["choices"][0]["message"] == whole.json["choices"][0]["message"]
        assert applied["dose"] == pytest.approx(whole.json["choices"][0]["applied"]["steering"][0]["dose"])


def test_toward_is_refused_for_a_vector_of_which_nobody_knows_the_side(
    open_client: FlaskClient, calibrated: SteeringVector, make_vector: MakeVector
) -> None:
    upload(open_client, (calibrated - 0.001 * make_vector("other", seed=9)).named("mix"))
    for toward in ("text", "vision", "auto"):
        steering = {"vector": "mix", "toward": toward}
        for response in (
            validate(open_client, steering=steering),
            ask(open_client, data_uri(), "x", steering=steering),
        ):
            assert problem(response) == (400, "not_a_preference", "steering.vector")
            assert "a signed 'scale' in 'steering.vectors'" in response.json["error"]["message"]
    assert validate(open_client, steering={"vectors": [{"name": "mix", "scale": -1.0}]}).status_code == 200


@pytest.mark.parametrize("parts", [[6.0, 6.0], [4.0, -4.0, 4.0]])
def test_naming_a_vector_several_times_does_not_get_past_the_limit(
    parts: list[float], open_client: FlaskClient, calibrated: SteeringVector
) -> None:
    upload(open_client, calibrated)
    named = [{"name": "mine", "scale": scale} for scale in parts]
    assert problem(validate(open_client, steering={"vectors": named}))[1:] == (
        "steering_strength_exceeded", "steering.vectors",
    )  # fmt: skip


@pytest.mark.parametrize(
    "forge",
    [
        lambda vector: (100.0 * vector).named("mine"),  # scaled up: told in published units, and refused by them
        lambda vector: replace(vector, weight=100 * vector.weight),  # which its metadata do not tell
        lambda vector: replace(vector, direction=100 * vector.direction, info={"published": 0.4}),
        lambda vector: replace(vector, weight=100 * vector.weight, info={"published": 1e-9}),
        lambda vector: replace(vector, weight=100 * vector.weight, info={}),
        lambda vector: replace(vector, weight=100 * vector.weight, mean_abs=100 * vector.mean_abs, info={}),
    ],
)
def test_a_vector_that_was_scaled_up_does_not_get_past_the_limit(
    forge: Callable[[SteeringVector], SteeringVector],
    open_client: FlaskClient,
    calibrated: SteeringVector,
) -> None:
    """100 times 0.4 of the states' magnitude is 40; a tenth of its strength is allowed again."""
    assert upload(open_client, forge(calibrated)).status_code == 201
    for steer in (
        {"vector": "mine", "strength": 1},
        {"vector": "mine", "toward": "auto"},
        {"vectors": [{"name": "mine"}]},
    ):
        for response in (
            validate(open_client, steering=steer),
            ask(open_client, data_uri(), "Text context: a\nb", steering=steer),
        ):
            assert problem(response)[:2] == (400, "steering_strength_exceeded")
    assert validate(open_client, steering={"vector": "mine", "strength": 0.09}).status_code == 200


def test_vectors_of_several_names_do_not_get_past_the_limit_together(
    open_client: FlaskClient, calibrated: SteeringVector
) -> None:
    """Each is asked for at 3.2 published, together they would add 6.4 times what the states have."""
    for name in ("one", "two"):
        upload(open_client, calibrated.named(name))
    named = [{"name": name, "scale": 8.0} for name in ("one", "two")]
    response = validate(open_client, steering={"vectors": named})
    assert problem(response)[1:] == ("steering_strength_exceeded", "steering.vectors")
    assert "times the mean magnitude of the model's states at layer 3" in response.json["error"]["message"]
    assert validate(open_client, steering={"vectors": [{**one, "scale": 4.0} for one in named]}).status_code == 200
