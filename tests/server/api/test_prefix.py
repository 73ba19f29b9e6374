"""Prompts that begin alike, over HTTP: what is told of it, and who shares."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.api.choices import choice_of, refused
from tests.server.conftest import ask, data_uri

LONG = "Text context: the green object is a heart. " * 4


@pytest.fixture(scope="module")
def client(engine: steering.Engine, settings: Settings) -> Any:
    """Yield a client of an engine with a prefix cache."""
    keeping = steering.Engine(engine.mllm, slots=4, self_check=False, threads=1, prefix_cache_bytes=2**24)
    keeping.start()
    yield create_app(settings, engine=keeping).test_client()
    keeping.stop()


def cached(client: FlaskClient, question: str, picture: Image.Image | None = None, **fields: Any) -> int:
    """Return the number of a prompt's tokens that were cached."""
    usage = ask(client, data_uri(picture), LONG, question, temperature=0, max_tokens=3, **fields).json["usage"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_what_was_known_is_told_and_counted(client: FlaskClient) -> None:
    found = [cached(client, question) for question in ("Is it red?", "Is it a star?")]
    assert found[0] == 0 < found[1]
    metrics = client.get("/metrics").text
    assert "helmsight_prefix_cache_queries_total 2.0" in metrics
    assert "helmsight_prefix_cache_hits_total 1.0" in metrics
    assert f'helmsight_tokens_total{{kind="cached"}} {float(found[1])}' in metrics
    assert "helmsight_prefix_cache_bytes 0.0" not in metrics


def test_a_salt_is_shared_by_those_who_have_it(client: FlaskClient) -> None:
    salts = ({}, {"cache_salt": "one"}, {"cache_salt": "other"}, {"cache_salt": "one"})
    found = [cached(client, "Which colour?", **salt) for salt in salts]
    assert found[3] > found[1] == found[2] == 0
    assert refused(ask(client, "What?", cache_salt=""))["param"] == "cache_salt"


def test_the_requests_that_find_a_way_have_the_salt_too(client: FlaskClient) -> None:
    blue = Image.new("RGB", (84, 84), "blue")
    salt = {"cache_salt": "auto"}
    choice_of(ask(client, data_uri(blue), LONG, "Which object?", max_tokens=2, steering={"toward": "auto"}, **salt))
    assert cached(client, "Which object?", blue) == 0
    assert cached(client, "Which object?", blue, **salt) > 0
