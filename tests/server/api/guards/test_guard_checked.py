"""The request that a guard gives again is checked before the first answer begins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import SecretStr

import steering
from server.app import create_app
from server.settings import PresetTable, Settings, SettingsError
from tests.server.api.choices import refused
from tests.server.api.guards.asking import BASE, CHAT
from tests.server.conftest import TOLD, user

CHECK = "/v1/steering/validate"
PLAIN: dict[str, Any] = {"messages": [user("What is red?")], "max_tokens": 6, "temperature": 0}
WHEN = {"mean_logprob": "> 0"}
UNTIL = {"toward": "vision", "until": {"attention_ratio": 0.3}}


@pytest.fixture(scope="module")
def client(engine: steering.Engine) -> FlaskClient:
    fields = {"guard": {"when": WHEN, "then": {"contrast": {"kind": "vcd"}}}}
    app = create_app(
        Settings(journal=SecretStr("off"), presets={"doubting": PresetTable(fields=fields)}), engine=engine
    )
    return app.test_client()


@pytest.mark.parametrize(
    ("own", "then", "param"),
    [
        (BASE, {"look_at": {"image": 3, "bias": 2}}, "guard.then.look_at.image"),
        (BASE, {"sage": True, "contrast": {"kind": "vcd"}}, "guard.then.contrast"),
        (BASE | {"contrast": {"kind": "vcd"}}, {"sage": True}, "guard.then.sage.generate"),
        (BASE | {"contrast": {"kind": "vcd"}}, {"steering": UNTIL}, "guard.then.steering.until"),
        (BASE, {"contrast": {"kind": "vcd"}, "steering": UNTIL}, "guard.then.steering.until"),
        (BASE, {"vista": {"layers": [99]}}, "guard.then.vista.layers"),
        (BASE, {"dola": {"premature": [99]}}, "guard.then.dola.premature"),
        (BASE, {"only": {"layer": 99}}, "guard.then.only.layer"),
        (BASE, {"sage": {"see": {"shallow": 99}}}, "guard.then.sage.see.shallow"),
        (BASE, {"project_out": {"vector": "modality-preference", "layers": [99]}}, "guard.then.project_out.layers"),
        (BASE, {"steering": {"toward": "text", "apply": {"tokens": "image:4"}}}, "guard.then.steering"),
        (BASE, {"min_tokens": 1_000_000}, "guard.then.min_tokens"),
        (BASE, {"logit_bias": {"99999999": 1}}, "guard.then.logit_bias"),
        (PLAIN, {"contrast": {"kind": "vcd"}}, "guard.then.contrast"),
        (BASE | {"min_tokens": 4}, {"max_tokens": 2}, "guard.then"),
        (BASE, {"guard": {}}, "guard.then.guard"),
    ],
)
def test_what_could_not_be_given_again_is_refused_at_once(
    client: FlaskClient, own: dict[str, Any], then: Any, param: str
) -> None:
    body = own | {"guard": {"when": WHEN, "then": then}}
    for route in (CHAT, CHECK):
        error = refused(client.post(route, json=body), 400)
        assert error["param"].startswith(param), (route, error)
        assert "guard.then.guard.then" not in error["message"]
        assert error["message"].count("'guard.then") >= 1


def test_an_error_of_the_request_itself_is_no_error_of_its_guard(client: FlaskClient) -> None:
    guard = {"when": WHEN, "then": {"temperature": 1}}
    for own, param in (({"vista": {"layers": [99]}}, "vista.layers"), ({"min_tokens": 9}, "min_tokens")):
        for route in (CHAT, CHECK):
            error = refused(client.post(route, json=BASE | own | {"guard": guard}), 400)
            assert error["param"].startswith(param)
            assert "guard" not in error["message"]


def test_without_messages_what_needs_no_prompt_is_checked(client: FlaskClient) -> None:
    then: dict[str, Any] = {"steering": {"vector": "unheard", "toward": "text"}}
    error = refused(client.post(CHECK, json={"guard": {"when": WHEN, "then": then}}), 400)
    assert error["param"].startswith("guard.then.steering.vector")
    error = refused(client.post(CHECK, json={"guard": {"when": {"unheard": True}, "then": {"sage": True}}}), 400)
    assert error["param"] == "guard.when.unheard"
    assert client.post(CHECK, json={"guard": {"when": WHEN, "then": {"sage": True}}}).status_code == 200


def test_parts_of_then_that_do_not_apply_are_skipped_as_others_are(client: FlaskClient) -> None:
    guard = {"when": WHEN, "then": {"contrast": {"kind": "vcd"}}}
    for body in (PLAIN | {"guard": guard, "strict": False}, PLAIN | {"model": "helmsight-demo@doubting"}):
        answer, report = client.post(CHAT, json=body), client.post(CHECK, json=body)
        assert (answer.status_code, report.status_code) == (200, 200), answer.text
        for skipped in (answer.json["choices"][0]["applied"]["skipped"], report.json["skipped"]):
            assert [part["field"] for part in skipped] == ["guard.then.contrast"]
            assert "'guard.then.contrast'" in skipped[0]["why"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"guard": {"when": WHEN, "then": {"sage": 7}}}, "guard.then.sage"),
        ({"guard": {"when": WHEN, "then": {"temperature": 9}}}, "guard.then.temperature"),
        ({"guard": {"when": WHEN, "then": {"messages": []}}}, "guard.then.messages"),
        ({"guard": {"when": {"unheard": True}, "then": {"sage": True}}}, "guard.when.unheard"),
        ({"guard": {"when": WHEN, "then": {"sage": True}}, "contrast": {"kind": "vcd"}}, "guard.then.sage.generate"),
    ],
)
def test_a_preset_whose_guard_cannot_act_ends_the_start(engine: steering.Engine, fields: Any, told: str) -> None:
    with pytest.raises(SettingsError, match=told.replace(".", r"\.")):
        create_app(Settings(journal=SecretStr("off"), presets={"wrong": PresetTable(fields=fields)}), engine=engine)


def test_the_limit_of_then_replaces_either_name_of_the_requests_own(client: FlaskClient) -> None:
    guard = {"when": {"mean_logprob": "< 0"}, "then": {"max_tokens": 2}}
    value = client.post(CHAT, json={"messages": TOLD, "temperature": 0, "max_completion_tokens": 6, "guard": guard})
    answers = value.json["choices"][0]["guard"]["answers"]
    assert [answer["completion_tokens"] for answer in answers] == [6, 2]
    value = client.post(
        "/v1/responses", json={"input": "What is red?", "temperature": 0, "max_output_tokens": 6, "guard": guard}
    )
    assert [answer["completion_tokens"] for answer in value.json["guard"]["answers"]][1:] == [2]


def test_a_way_to_stream_a_guard_is_useless_without_one(client: FlaskClient) -> None:
    body = BASE | {"guard_stream": "first"}
    assert client.post(CHAT, json=body).json["ignored"] == ["guard_stream"]
    assert refused(client.post(CHAT, json=body | {"strict": True}), 400)["param"] == "guard_stream"
    guard = {"when": WHEN, "then": {"temperature": 1}}
    assert client.post(CHAT, json=body | {"strict": True, "guard": guard}).status_code == 200


def test_conditions_that_are_no_object_are_called_so(client: FlaskClient) -> None:
    for value in (None, 3, []):
        error = refused(client.post(CHAT, json=BASE | {"guard": {"when": value, "then": {"sage": True}}}), 400)
        assert error["param"] == "guard.when"
        assert "must be an object" in error["message"]


def test_the_published_form_of_a_comparison_is_the_one_that_is_read(client: FlaskClient) -> None:
    schema = client.get("/openapi.json").json["components"]["schemas"]["Guard"]["properties"]["when"]
    (pattern,) = (form["pattern"] for form in schema["additionalProperties"]["anyOf"] if "pattern" in form)
    for text in ("< .5", "<5.", " >= -1e-3 ", "==0", "!= 1E+2", "< 1.2.3", "< --1", "<", "< 1e", "< ١", "< +1", "< -"):
        body = BASE | {"guard": {"when": {"mean_logprob": text}, "then": {"temperature": 1}}}
        accepted = client.post(CHECK, json=body).status_code == 200
        assert accepted == (re.search(pattern, text) is not None), text
