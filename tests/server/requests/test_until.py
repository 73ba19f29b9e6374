"""A strength that follows a number, over HTTP: its course in `applied`, its fields, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.api.choices import refused
from tests.server.conftest import TOLD
from tests.server.journal.rows import rows_of

CHAT = "/v1/chat/completions"
BASE: dict[str, Any] = {"messages": TOLD, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    folder = tmp_path_factory.mktemp("journal")
    app = create_app(Settings(journal=str(folder / "journal.db")), engine=engine)
    yield app.test_client()
    app.extensions["helmsight"].journal.close()


def followed(client: FlaskClient, until: Any, **fields: Any) -> Any:
    response = client.post(CHAT, json=BASE | {"steering": {"toward": "vision", "until": until, **fields}})
    assert response.status_code == 200, response.text
    (entry,) = response.json["choices"][0]["applied"]["steering"]  # type: ignore[index]
    return entry


def test_the_course_is_in_applied_and_its_summary_in_the_journal(client: FlaskClient) -> None:
    entry = followed(client, {"attention_ratio": 1.0}, strength=0.2, control={"gain": 0.5, "band": 0})
    until = entry["until"]
    assert until["attention_ratio"] == 1.0
    assert until["control"] == {"gain": 0.5, "smoothing": 0.25, "band": 0, "range": [0, 1]}
    strengths = until["course"]["strength"]
    assert len(strengths) == len(until["course"]["attention_ratio"]) == 8
    assert strengths[0] == pytest.approx(0.2)
    assert strengths == sorted(strengths), "no ratio reaches 1, so the strength only rises"
    assert strengths[-1] > 0.2
    # Every step by hand, from the ratios that the answer reports.
    level, strength = None, 0.2
    for at, ratio in zip(strengths, until["course"]["attention_ratio"], strict=True):
        assert at == pytest.approx(strength, abs=1e-5)
        level = ratio if level is None else level + 0.25 * (ratio - level)
        strength = min(max(strength + 0.5 * (1.0 - level), 0.0), 1.0)
    row = rows_of(client, 1)[0]
    kept = row["applied"]["steering"][0]["until"]
    assert kept["strength"] == until["strength"]
    assert "course" not in kept
    text = followed(client, {"attention_ratio": 0.0}, toward="text", strength=0.0)
    assert text["toward"] == "text"
    assert text["until"]["strength"]["last"] >= 0.0


def test_a_gate_that_is_closed_leaves_no_loop(client: FlaskClient) -> None:
    for above, moves in ((1.0, False), (-1.0, True)):
        when = {"vector": "modality-preference", "above": above}
        entry = followed(client, {"attention_ratio": 1.0}, strength=0.5, when=when)
        assert ("until" in entry) is moves is entry["gate"]["open"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"until": {}}, "steering.until"),
        ({"until": {"unheard": 0.5}}, "steering.until"),
        ({"until": {"attention_ratio": 0.5, "image_share": 0.5}}, "steering.until"),
        ({"until": {"attention_ratio": 1.5}}, "steering.until.attention_ratio"),
        ({"until": {"attention_ratio": "high"}}, "steering.until.attention_ratio"),
        ({"until": {"attention_ratio": 0.5}, "toward": "auto"}, "steering.until"),
        ({"until": {"attention_ratio": 0.5}, "vectors": [{"name": "modality-preference"}]}, "steering.until"),
        ({"auto": {"criterion": "drop"}}, "steering.auto"),
        ({"control": {"gain": 1}}, "steering.control"),
        ({"until": {"attention_ratio": 0.5}, "control": {"gain": -1}}, "steering.control.gain"),
        ({"until": {"attention_ratio": 0.5}, "control": {"range": [0, 9]}}, "steering.control.range"),
        ({"until": {"attention_ratio": 0.5}, "control": {"range": [0.5, 1]}, "strength": 0.1}, "steering.strength"),
        ({"until": {"attention_ratio": 0.5}, "apply": {"tokens": "image"}}, "steering.apply.tokens"),
        ({"until": {"attention_ratio": 0.5}, "strength": 3}, "steering.strength"),
    ],
)
def test_what_is_refused_names_its_field(client: FlaskClient, fields: Any, param: str) -> None:
    body = BASE | {"steering": {"toward": "vision", **fields}}
    assert refused(client.post(CHAT, json=body), 400)["param"] == param


def test_it_is_refused_with_a_contrast_and_without_a_context(client: FlaskClient) -> None:
    until = {"steering": {"toward": "vision", "until": {"attention_ratio": 0.5}}}
    contrasted = refused(client.post(CHAT, json=BASE | until | {"contrast": {"kind": "vcd"}}), 400)
    assert (contrasted["param"], "twin" in contrasted["message"]) == ("steering.until", True)
    bare = [{"role": "user", "content": "What is it?"}]
    assert refused(client.post(CHAT, json=BASE | until | {"messages": bare}), 400)["param"].startswith("steering")


def test_the_limit_on_strengths_holds_for_the_greatest_of_the_range(engine: steering.Engine) -> None:
    client = create_app(Settings(journal="off", max_strength=0.4), engine=engine).test_client()
    until = {"steering": {"toward": "vision", "strength": 0.1, "until": {"attention_ratio": 0.5}}}
    assert refused(client.post(CHAT, json=BASE | until), 400)["code"] == "steering_strength_exceeded"
    until["steering"]["control"] = {"range": [0, 0.5]}
    assert client.post(CHAT, json=BASE | until).status_code == 200
