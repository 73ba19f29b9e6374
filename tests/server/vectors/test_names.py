"""Any intervention may have a steering vector among its options: a request names it, and the engine is given the vector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from server.app import create_app
from server.settings import Settings
from server.vectors.names import has, has_defaults
from steering import Options, SteeringVector, VectorStore
from steering.protocol.intervention import REGISTRY, register
from steering.vectors.option import Vector
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine


class Twofold(Options):
    """A vector that has a default, and one that may be left out."""

    path = ("twofold",)

    vector: Vector = "modality-preference"
    other: Vector | None = None
    size: float = 1.0


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(REGISTRY)
    register(Twofold)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture
def named(registered: None, fake: FakeEngine, vectors: Path) -> FlaskClient:
    fake.can(interventions=frozenset(REGISTRY))
    return create_app(Settings(vectors=(str(vectors),)), engine=fake).test_client()  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, {"vector": "modality-preference"}])
def test_the_engine_is_given_the_vector_of_the_name(
    named: FlaskClient, fake: FakeEngine, vectors: Path, value: Any
) -> None:
    assert ask(named, twofold=value).status_code == 200
    asked = fake.requests[-1].asked["twofold"]
    assert isinstance(asked, Twofold)
    assert isinstance(asked.vector, SteeringVector)
    assert asked.vector.digest == VectorStore(vectors).get("modality-preference").digest
    assert asked.vectors == ["modality-preference"]
    assert asked.settings() == {"vector": "modality-preference", "other": None, "size": 1.0}


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({"vector": "nobody"}, "twofold.vector", "unknown_vector"),
        ({"vector": "../etc"}, "twofold.vector", "unknown_vector"),
        ({"vector": 7}, "twofold.vector", "invalid_value"),
        ({"vector": None}, "twofold.vector", "invalid_value"),
        ({"other": "nobody"}, "twofold.other", "unknown_vector"),
        ({"vektor": "x"}, "twofold.vektor", "unknown_parameter"),
    ],
)
def test_what_names_no_vector_is_refused(named: FlaskClient, value: Any, param: str, code: str) -> None:
    response = ask(named, twofold=value)
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_a_vector_that_is_not_there_is_skipped_where_that_is_allowed(named: FlaskClient, fake: FakeEngine) -> None:
    answer = ask(named, twofold={"vector": "nobody"}, strict=False).json
    assert [one["field"] for one in answer["choices"][0]["applied"]["skipped"]] == ["twofold"]
    assert not fake.requests[-1].asked


def test_the_schema_says_that_it_is_a_name(named: FlaskClient) -> None:
    model, *_ = named.get("/v1/models").json["data"]
    (described,) = [one for one in model["interventions"] if one["name"] == "twofold"]
    vector = described["schema"]["properties"]["vector"]
    assert vector == {"default": "modality-preference", "title": "Vector", "type": "string"}


def test_a_preset_is_offered_where_its_default_vector_is_there(vectors: Path, fake: FakeEngine) -> None:
    fingerprint = VectorStore(vectors).get("modality-preference").fingerprint
    assert has_defaults(Twofold, VectorStore(vectors), fingerprint)
    assert not has_defaults(Twofold, VectorStore(vectors), "another")
    assert not has_defaults(Twofold, VectorStore(vectors / "nowhere"), fingerprint)
    assert has(VectorStore(vectors), "modality-preference", fingerprint, preference=True)
