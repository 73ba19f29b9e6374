"""The document of the API: valid, complete, and true of every request that it shows and every answer that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    UnsupportedTransferCoding,
)
from jsonschema import Draft202012Validator, ValidationError
from openapi_spec_validator import validate
from pydantic import SecretStr

import steering
from server.app import create_app
from server.engine.runtime import Runtime
from server.http.intake import refused
from server.openapi.examples import chat
from server.requests import answer_files
from server.settings import Settings
from steering import Options
from steering.protocol.intervention import REGISTRY, register
from tests.server.fakes import FakeEngine
from tests.server.openapi.checker import Checker
from tests.toys.nudge import Nudge, NudgeSlots

KEY = "sk-0123456789"
STORED = "/v1/chat/completions/{identity}"
RESPONSE = "/v1/responses/{identity}"
ROWS = "/v1/diagnostics/{identity}"
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
MESSAGE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def app(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Flask:
    """Return an application of the embedded model with its own vectors, a journal, and a folder for uploads."""
    folder = tmp_path_factory.mktemp("openapi")
    settings = Settings(
        vectors=(str(folder / "vectors"),), journal=SecretStr(str(folder / "journal.db")), allow_uploads=True, slots=4,
    )  # fmt: skip
    return create_app(settings, engine=engine)


@pytest.fixture(scope="module")
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="module")
def document(client: FlaskClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json
    return found


def idle(**settings: Any) -> FlaskClient:
    """Return a client of a server whose engine does nothing."""
    return create_app(Settings(journal=SecretStr("off"), **settings), engine=FakeEngine()).test_client()  # type: ignore[arg-type]


def test_it_is_a_valid_document(document: dict[str, Any]) -> None:
    validate(document)
    assert "x-layers" not in json.dumps(document)
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema.get("description"), f"{name} says nothing of itself"


def test_every_route_is_in_it_and_nothing_else(app: Flask, document: dict[str, Any]) -> None:
    routes = {
        (rule.rule.replace("<path:", "<").replace("<", "{").replace(">", "}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == routes


def test_every_route_may_answer_what_the_server_answers_before_it(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["responses"]["default"] == {"$ref": "#/components/responses/Unread"}, path
    said = document["components"]["responses"]["Unread"]
    for error in (
        LimitRequestLine(1, 1),
        LimitRequestHeaders(""),
        ExpectationFailed(""),
        UnsupportedTransferCoding(""),
    ):
        assert str(refused(error).status) in said["description"]
    assert said["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_every_parameter_of_a_path_is_described(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            said = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert said == {part[1:-1] for part in path.split("/") if part.startswith("{")}, path


# -- what comes back is what it says ---------------------------------------------------------------------------------------


def test_a_key_that_is_not_described_is_found(client: FlaskClient) -> None:
    checker, health = Checker(client), {"$ref": "#/components/schemas/Health"}
    checker.valid({"status": "ok"}, health)
    for wrong in ({"status": "ok", "since": 1}, {"status": "well"}, {}):
        with pytest.raises(ValidationError):
            checker.valid(wrong, health)


@pytest.fixture(scope="module")
def checker(client: FlaskClient) -> Checker:
    return Checker(client)


def bodies(document: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [
        (path, name, example["value"])
        for path, methods in document["paths"].items()
        for name, example in methods.get("post", {})
        .get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("examples", {})
        .items()
    ]


def test_every_body_that_it_shows_is_answered_as_it_says(checker: Checker) -> None:
    shown = bodies(checker.document)
    kept = checker.send("post", "/v1/chat/completions", json=chat("What is it?", store=True)).json["id"]
    others = {"/v1/messages/count_tokens", "/v1/steering/validate", STORED, ROWS}
    assert {path for path, _, _ in shown} == {*CHATS, *others}
    for path, name, body in shown:
        schema = checker.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        checker.valid(body, schema)
        assert checker.send("post", path, path.replace("{identity}", kept), json=body).status_code == 200, name


def test_what_it_shows_does_what_it_says(client: FlaskClient, document: dict[str, Any]) -> None:
    shown = {name: body for path, name, body in bodies(document) if path == "/v1/chat/completions"}
    (steered,) = client.post("/v1/chat/completions", json=shown["steering"]).json["choices"]
    assert steered["message"]["content"] == "The green object is a heart."
    assert steered["baseline"]["message"]["content"] == "The green object is a star."
    assert {kind.path[0] for kind, _ in REGISTRY.values()} <= shown.keys()


def test_every_parameter_that_it_shows_is_taken(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_files, "INLINE", 0)
    read = checker.send("post", "/v1/chat/completions", json=chat("hi", diagnostics={"include": ["states"]})).json
    states = read["choices"][0]["diagnostics"]["states"]["file"]
    body = chat("What is it?", steering=True, store=True)
    answer = checker.send("post", "/v1/chat/completions", json=body).json["id"]
    kept = checker.send("post", "/v1/chat/completions", json=body).json["id"]
    checker.send("post", STORED, STORED.replace("{identity}", answer), json={"metadata": None})
    checker.send("post", ROWS, ROWS.replace("{identity}", answer), json={"metadata": {"answer_correct": "true"}})
    checker.send("delete", STORED, STORED.replace("{identity}", answer))
    answer = kept
    begun, gone = (
        checker.send("post", "/v1/responses", json={"input": "hi", "store": True, "max_output_tokens": 1}).json["id"]
        for _ in range(2)
    )
    checker.send("delete", RESPONSE, RESPONSE.replace("{identity}", gone))
    for path, text in (("/v1/messages", True), ("/v1/messages/count_tokens", False)):
        message = {"messages": [{"role": "user", "content": "hi"}], **({"max_tokens": 1} if text else {})}
        checker.send("post", path, json=message)
    vectors = "/v1/steering/vectors"
    file = checker.send("get", f"{vectors}/{{name}}/file", f"{vectors}/modality-preference/file").data
    upload = {"data": file, "headers": {"Content-Type": "application/octet-stream"}}
    shown = {one["name"]: one["example"] for one in checker.document["paths"][vectors]["post"]["parameters"]}
    for query in (f"name={shown['name']}", f"name={shown['name']}&replace={shown['replace']}"):
        assert checker.send("post", vectors, f"{vectors}?{query}", **upload).status_code == 201
    checker.send("post", "/v1/steering/validate", json={"steering": True})
    queries = 0
    for path, methods in checker.document["paths"].items():
        sent_before = {"post", "delete"} if path in (STORED, RESPONSE) else {"post"}
        for method in sorted(methods.keys() - sent_before, reverse=True):
            url, asked = path, [""]
            for one in methods[method].get("parameters", ()):
                if one["in"] == "path":
                    known = begun if path.startswith(RESPONSE) else states if "/states/" in path else answer
                    url = url.replace(f"{{{one['name']}}}", one.get("example", known))
                elif "example" in one:
                    asked.append(f"?{one['name']}={one['example']}")
            for query in asked:
                assert checker.send(method, path, url + query).status_code == 200, url + query
            queries += len(asked) - 1
    assert queries > 20
    sent = {(path, method) for path, method, status in checker.seen if status < 300}
    assert sent == {(path, method) for path, methods in checker.document["paths"].items() for method in methods}


def test_a_page_of_the_journal_leads_to_the_next(checker: Checker) -> None:
    for _ in range(2):
        checker.send("post", "/v1/chat/completions", json=chat("What is it?", max_tokens=1))
    first = checker.send("get", "/v1/diagnostics", "/v1/diagnostics?limit=1").json
    before = first["next"]
    second = checker.send("get", "/v1/diagnostics", f"/v1/diagnostics?limit=1&before={before}").json
    assert first["data"][0]["id"] != second["data"][0]["id"]


@pytest.mark.parametrize(
    ("method", "path", "url", "options", "status"),
    [
        ("post", "/v1/chat/completions", None, {"json": {"messages": []}}, 400),
        ("post", "/v1/chat/completions", None, {"json": chat("hi", model="other")}, 404),
        ("post", "/v1/chat/completions", None, {"data": "hi"}, 415),
        ("post", "/v1/chat/completions", None, {"data": b" " * 2**26, "content_type": "application/json"}, 413),
        ("post", "/v1/chat/completions", None, {"json": chat("hi"), "headers": {"Host": "elsewhere.com"}}, 403),
        ("get", "/v1/models/{name}", "/v1/models/other", {}, 404),
        ("get", "/v1/steering/vectors/{name}", "/v1/steering/vectors/nothing", {}, 404),
        ("get", "/v1/steering/vectors/{name}/file", "/v1/steering/vectors/nothing/file", {}, 404),
        ("delete", "/v1/steering/vectors/{name}", "/v1/steering/vectors/nothing", {}, 404),
        ("delete", "/v1/steering/vectors/{name}", "/v1/steering/vectors/modality-preference", {}, 403),
        ("post", "/v1/steering/vectors", None, {"data": b"x", "content_type": "text/plain"}, 415),
        ("post", "/v1/steering/vectors", None, {"data": b"x", "content_type": "application/octet-stream"}, 400),
        ("post", "/v1/steering/validate", None, {"json": {"sage": "on"}}, 400),
        ("get", "/v1/diagnostics", "/v1/diagnostics?flag=red", {}, 400),
        ("get", "/v1/diagnostics/summary", "/v1/diagnostics/summary?limit=1", {}, 400),
        ("get", "/v1/diagnostics/{identity}", "/v1/diagnostics/nothing", {}, 404),
        ("get", "/v1/chat/completions", "/v1/chat/completions?limit=0", {}, 400),
        ("get", STORED, "/v1/chat/completions/nothing", {}, 404),
        ("post", STORED, "/v1/chat/completions/nothing", {"json": {"metadata": {}}}, 404),
        ("post", STORED, "/v1/chat/completions/nothing", {"json": {"metadata": {"answer_correct": "yes"}}}, 400),
        ("delete", STORED, "/v1/chat/completions/nothing", {}, 404),
        ("post", "/v1/responses", None, {"json": {"input": []}}, 400),
        ("post", "/v1/responses", None, {"json": {"input": "hi", "previous_response_id": "resp_0"}}, 404),
        ("post", "/v1/responses", None, {"data": b" " * 2**26, "content_type": "application/json"}, 413),
        ("get", RESPONSE, "/v1/responses/nothing", {}, 404),
        ("get", f"{RESPONSE}/input_items", "/v1/responses/nothing/input_items", {}, 404),
        ("delete", RESPONSE, "/v1/responses/nothing", {}, 404),
        ("post", "/v1/messages", None, {"json": {"messages": []}}, 400),
        ("post", "/v1/messages", None, {"json": MESSAGE | {"model": "other"}}, 404),
        ("post", "/v1/messages", None, {"data": "hi"}, 415),
        ("post", "/v1/messages", None, {"data": b" " * 2**26, "content_type": "application/json"}, 413),
        ("post", "/v1/messages", None, {"json": MESSAGE, "headers": {"Host": "elsewhere.com"}}, 403),
        ("post", "/v1/messages/count_tokens", None, {"json": {"messages": "hi"}}, 400),
        ("get", "/static/{name}", "/static/nothing.js", {}, 404),
        ("get", "/samples/{name}", "/samples/nothing.png", {}, 404),
    ],
)  # fmt: skip
def test_refusals_are_as_it_says(
    checker: Checker, method: str, path: str, url: str | None, options: dict[str, Any], status: int
) -> None:
    assert checker.send(method, path, url, **options).status_code == status


def test_the_error_that_it_shows_is_one(checker: Checker) -> None:
    (shown,) = checker.document["components"]["schemas"]["ErrorBody"]["examples"]
    wrong = chat("hi", steering={"toward": "left"})
    assert checker.send("post", "/v1/chat/completions", json=wrong).json == shown


def test_refusals_of_the_whole_server_are_as_it_says(fake: FakeEngine) -> None:
    locked = Checker(idle(api_keys=(SecretStr(KEY),)))
    for path in CHATS:
        assert locked.send("post", path, json=chat("hi")).status_code == 401
        assert locked.client.post(path, json={}, headers={"x-api-key": KEY}).status_code == 400
    for path, methods in locked.document["paths"].items():
        url = path.replace("{name}", "x").replace("{identity}", "x")
        for method, operation in methods.items():
            assert (locked.client.open(url, method=method.upper()).status_code == 401) == (
                "security" not in operation
            ), path
    fake.refusal = steering.Busy(3, 1.5)
    settings = Settings(journal=SecretStr("off"))
    busy = Checker(create_app(settings, engine=fake).test_client())  # type: ignore[arg-type]
    for path, body in zip(CHATS, (chat("hi"), {"input": "hi"}, MESSAGE), strict=True):
        assert busy.send("post", path, json=body).status_code == 429
    assert busy.send("get", "/v1/diagnostics").status_code == 503
    loading = Checker(create_app(settings, runtime=Runtime(settings)).test_client())
    for method, path in (*(("post", path) for path in CHATS), ("get", "/v1/models"), ("get", "/ready")):
        assert loading.send(method, path, **({"json": {}} if method == "post" else {})).status_code == 503
    assert loading.send("get", "/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", chat("hi"), "server_error"),
        ("/v1/responses", {"input": "hi"}, "server_error"),
        ("/v1/messages", MESSAGE, "api_error"),
    ],
)
def test_a_stream_that_breaks_ends_as_it_says(path: str, body: dict[str, Any], error: str) -> None:
    engine = FakeEngine("Hello", steering.Fault("no"))
    checker = Checker(create_app(Settings(journal=SecretStr("off")), engine=engine).test_client())  # type: ignore[arg-type]
    text = checker.client.post(path, json=body | {"stream": True}, buffered=True).text
    schema = checker.document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    *_, last, _ = text.split("\n\n")
    value = json.loads(last.rpartition("data: ")[2])
    found = value.get("response", value)["error"]
    assert found.get("type", found.get("code")) == error
    checker.valid(value, schema)


# -- the registry ----------------------------------------------------------------------------------------------------------


class Tint(Options):
    """The base of two new interventions that share a path."""

    path = ("tint",)
    depth: int = 1


@pytest.fixture
def registered() -> Iterator[None]:
    known = dict(REGISTRY)
    register(Nudge, NudgeSlots)
    for kind in ("warm", "cold"):
        register(type(kind.title(), (Tint,), {"kind": kind, "__module__": __name__, "__doc__": f"A {kind} tint."}))
    yield
    REGISTRY.clear()
    REGISTRY.update(known)


def test_a_registered_intervention_appears_by_itself(registered: None) -> None:
    checker = Checker(idle())
    validate(checker.document)
    schemas = checker.document["components"]["schemas"]
    assert schemas["Nudge"]["description"].startswith("One token becomes likelier")
    assert schemas["Nudge"]["required"] == ["token"]
    assert schemas["Nudge"]["properties"]["by"]["maximum"] == 100
    body = {"$ref": "#/components/schemas/ChatRequest"}
    shown = {name: value for path, name, value in bodies(checker.document) if path == "/v1/chat/completions"}
    assert (shown["nudge"]["nudge"], shown["tint"]["tint"]) == ({"token": 0, "by": 1.0}, {"kind": "warm", "depth": 1})
    right = ({"nudge": {"token": 3}}, {"nudge": False}, {"tint": {"kind": "cold"}}, {"tint": None})
    wrong = (
        {"nudge": {}},
        {"nudge": {"token": -1}},
        {"nudge": {"token": 1, "to": 2}},
        {"tint": True},
        {"tint": {"kind": "red"}},
    )
    request = Draft202012Validator({"components": {"schemas": schemas}, **body})
    assert all(request.is_valid(chat("hi", **one)) for one in right)
    assert not any(request.is_valid(chat("hi", **one)) for one in wrong)
    assert {"nudge", "tint"} <= schemas["Applied"]["properties"].keys()
