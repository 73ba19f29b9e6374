"""A readout that is registered is asked for, answered, counted and listed like those of the house."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.settings import Settings
from steering.protocol.readout import REGISTRY, register
from tests.server.api.test_operations import samples, total
from tests.server.conftest import ask, data_uri, user
from tests.toys.norm import Norm


@pytest.fixture
def client(engine: steering.Engine) -> Iterator[FlaskClient]:
    register(Norm())
    own = steering.Engine(engine.mllm, slots=2, self_check=False)
    own.start()
    yield create_app(Settings(), engine=own).test_client()
    own.stop()
    del REGISTRY["norm"]


def test_a_registered_readout_comes_over_http(client: FlaskClient, engine: steering.Engine) -> None:
    asked = ask(client, data_uri(), "What is it?", max_tokens=1, diagnostics={"include": ["norm"]}).json
    said = asked["choices"][0]["diagnostics"]["norm"]
    model, *_ = client.get("/v1/models").json["data"]
    assert "norm" in model["readouts"]
    metrics = samples(client)
    assert metrics['helmsight_diagnostics_total{readout="norm"}'] == 1
    assert total(metrics, "helmsight_last_norm_count", intervention="none", source="live") == 1
    picture = {"type": "image", "image": Image.new("RGB", (84, 84), "red")}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    (result,) = engine.generate([steering.Request(chat, steering.Sampling(max_tokens=1), states=True)])
    states = result.choices[0].states
    assert states is not None
    assert said["by_layer"][-1] == pytest.approx(float(states[-1].norm()), rel=1e-4)


def test_a_context_in_a_system_message_is_read(client: FlaskClient) -> None:
    """Retrieval puts a context there, as a part or as a line."""
    asked = {"max_tokens": 2, "diagnostics": {"include": ["modality"]}}
    for content in (
        [{"type": "text", "text": "It is blue.", "span": "context"}],
        "Be brief.\nText context: It is blue.",
    ):
        for role in ("system", "developer"):
            chat = [{"role": role, "content": content}, user(data_uri(), "What colour is it?")]
            answer = client.post("/v1/chat/completions", json={"messages": chat, **asked}).json
            assert answer is not None
            said = answer["choices"][0]["diagnostics"]["modality"]
            assert 0 < said["attention_ratio"] < 1
            assert said["reason"] is None
    plain = ask(client, data_uri(), "What colour is it?", **asked).json["choices"][0]["diagnostics"]["modality"]
    assert (plain["attention_ratio"], plain["reason"]) == (None, "no_context")
    assert 0 < plain["image_share"] < 1


def test_the_engine_of_before_refuses_it(client: FlaskClient, engine: steering.Engine) -> None:
    response = ask(create_app(Settings(), engine=engine).test_client(), diagnostics={"include": ["norm"]})
    assert (response.status_code, response.json["error"]["param"]) == (400, "diagnostics.include")
