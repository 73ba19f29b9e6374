"""The narrow protocol between the server and an engine, and what becomes of requests for what an engine cannot do."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.engine import served as protocols
from server.engine.local import LocalEngine, adapted
from server.settings import Settings, SettingsError
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeCompletion, FakeEngine, FakeTurn


def methods(kind: type) -> dict[str, Any]:
    """Return the functions that a protocol asks for."""
    return {name: one for name, one in vars(kind).items() if inspect.isfunction(one) and not name.startswith("_")}


@pytest.mark.parametrize(
    ("protocol", "kinds"),
    [
        (protocols.ServedEngine, (LocalEngine, FakeEngine)),
        (protocols.ServedTurn, (steering.Turn, FakeTurn)),
        (protocols.ServedCompletion, (steering.Completion, FakeCompletion)),
    ],
)
def test_own_and_fake_take_what_the_protocol_says(protocol: type[Protocol], kinds: tuple[type, ...]) -> None:
    for kind in kinds:
        for name, asked in methods(protocol).items():
            found, wanted = (list(inspect.signature(one).parameters.values()) for one in (getattr(kind, name), asked))
            assert [(one.name, one.default) for one in found] == [(one.name, one.default) for one in wanted], name


def test_own_and_fake_are_engines(engine: steering.Engine, fake: FakeEngine) -> None:
    assert not isinstance(engine, protocols.ServedEngine)
    for one in (adapted(engine), fake):
        assert isinstance(one, protocols.ServedEngine)
        with one.turn() as turn:
            assert isinstance(turn, protocols.ServedTurn)
            completion = turn.submit(
                steering.Request([{"role": "user", "content": "hi"}], steering.Sampling(max_tokens=2))
            )
            assert isinstance(completion, protocols.ServedCompletion)
            assert completion.result().choices
    assert adapted(fake) is fake


def test_capabilities_are_the_models(engine: steering.Engine) -> None:
    capabilities, mllm = adapted(engine).capabilities, engine.mllm
    assert (capabilities.name, capabilities.fingerprint, capabilities.layers, capabilities.hidden_size) == (
        mllm.name, mllm.fingerprint, mllm.num_layers, mllm.hidden_size,
    )  # fmt: skip
    assert (capabilities.device, capabilities.dtype, capabilities.folder) == ("cpu", "float32", mllm.path)
    assert (capabilities.context_length, capabilities.text.tokens) == (engine.max_length, engine.max_length)


@pytest.fixture
def poor(fake: FakeEngine) -> FlaskClient:
    """Return a client of an engine that can neither contrast nor see into attention."""
    fake.can(interventions=frozenset({"sage.think"}), readouts=frozenset({"residual"}))
    return create_app(Settings(journal="off"), engine=fake).test_client()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"sage": True}, "sage.see", "'sage.see' is not supported by this server's engine."),
        (
            {"contrast": {"kind": "vcd"}},
            "contrast.kind",
            "'contrast' of kind vcd is not supported by this server's engine.",
        ),
        ({"steering": True}, "steering", "'steering' is not supported by this server's engine."),
        ({"steering": {"toward": "auto"}}, "steering", "'steering' is not supported by this server's engine."),
        (
            {"diagnostics": {"include": ["residual", "tam"]}},
            "diagnostics.include",
            "the readout 'tam' is not supported",
        ),
        ({"diagnostics": {"heatmaps": True}}, "diagnostics.heatmaps", "the readout 'heatmaps' is not supported"),
    ],
)
def test_what_an_engine_cannot_do_names_the_field(
    poor: FlaskClient, fake: FakeEngine, fields: dict[str, Any], param: str, what: str
) -> None:
    response = ask(poor, data_uri(), "hi", **fields)
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_value")
    assert what in error["message"]
    assert not fake.requests


def test_a_disabled_intervention_is_refused_by_its_field_and_listed_as_unsupported(fake: FakeEngine) -> None:
    settings = Settings(journal="off", disable_interventions=("sage.see",))  # type: ignore[arg-type]
    client = create_app(settings, engine=fake).test_client()
    response = ask(client, data_uri(), "hi", sage={"see": True})
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "sage.see", "unsupported_value")
    assert error["message"] == "'sage.see' is disabled on this server."
    assert not fake.requests
    assert ask(client, data_uri(), "hi", sage={"see": False, "think": True}).status_code == 200
    model, *_ = client.get("/v1/models").json["data"]
    assert "sage.see" in model["unsupported"]
    assert not {"sage.see"} & {entry["name"] for entry in model["interventions"]}


def test_a_misspelt_disabled_intervention_stops_the_start(fake: FakeEngine) -> None:
    settings = Settings(journal="off", disable_interventions=("oprea",))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="disable_interventions': 'oprea' is unknown; did you mean 'opera'"):
        create_app(settings, engine=fake)


def test_what_it_can_do_is_served_and_listed(poor: FlaskClient, fake: FakeEngine) -> None:
    assert ask(poor, sage={"see": False, "generate": False}, diagnostics=True).status_code == 200
    assert list(fake.requests[-1].asked) == ["sage.think"]
    assert fake.requests[-1].diagnose.include == frozenset(), "none of the cheap ones"
    model, *_ = poor.get("/v1/models").json["data"]
    assert [one["name"] for one in model["interventions"]] == ["sage.think"]
    assert model["readouts"] == ["residual"]
