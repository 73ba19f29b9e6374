"""Pages elsewhere may call the API where their origin is set, and read whatever it answers; others may not."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient
from pydantic import ValidationError

from server.access import cors
from server.app import create_app
from server.settings import Settings
from tests.server.conftest import user
from tests.server.fakes import FakeEngine

KEY = "a-key-of-a-page"
PAGE = "https://app.example.org"
ALLOW, EXPOSE = "Access-Control-Allow-Origin", "Access-Control-Expose-Headers"
BODY = {"model": "fake", "messages": [user("", "Hello")]}


def client_of(fake: FakeEngine, *origins: str, key: str | None = None) -> FlaskClient:
    settings = Settings(cors_origin=origins, api_keys=() if key is None else (key,))  # type: ignore[arg-type]
    return create_app(settings, engine=fake).test_client()  # type: ignore[arg-type]


def test_a_preflight_is_answered_without_a_key(fake: FakeEngine) -> None:
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    answer = client_of(fake, PAGE, key=KEY).options("/v1/chat/completions", headers=asked)
    assert (answer.status_code, answer.headers[ALLOW]) == (200, PAGE)
    assert {"authorization", "content-type", "x-stainless-lang"} <= {
        name.strip().lower() for name in answer.headers["Access-Control-Allow-Headers"].split(",")
    }
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in answer.headers


def test_answers_streams_and_errors_can_be_read(fake: FakeEngine) -> None:
    client = client_of(fake, PAGE)
    for body, status in ((BODY, 200), (BODY | {"stream": True}, 200), (BODY | {"steering": 1}, 400)):
        answer = client.post("/v1/chat/completions", json=body, headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers[ALLOW]) == (status, PAGE)
        assert "X-Request-Id" in answer.headers[EXPOSE]
        assert answer.headers["X-Request-Id"]
    refused = client_of(fake, PAGE, key=KEY).get("/v1/models", headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers[ALLOW]) == (401, PAGE)
    assert client.get("/nowhere", headers={"Origin": PAGE}).headers[ALLOW] == PAGE


@pytest.mark.parametrize("origins", [(), (PAGE,), (PAGE, "http://localhost:3000"), ("*",)])
@pytest.mark.parametrize("origin", [PAGE, PAGE.upper(), f"{PAGE}.evil.example"])
def test_what_the_application_has_not_read_says_the_same(
    fake: FakeEngine, origins: tuple[str, ...], origin: str
) -> None:
    client = client_of(fake, *origins, key=KEY)
    found = client.get("/v1/models", headers={"Origin": origin}).headers
    said = cors.headers(client.application.extensions["helmsight"].settings, origin)
    assert {name: sorted(found.get(name, "").split(", ")) for name in (ALLOW, EXPOSE, "Vary")} == {
        name: sorted(said.get(name, "").split(", ")) for name in (ALLOW, EXPOSE, "Vary")
    }


def test_other_pages_are_told_nothing(fake: FakeEngine) -> None:
    for client in (client_of(fake), client_of(fake, PAGE)):
        answer = client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert answer.status_code == 403
        assert ALLOW not in answer.headers
    with_key = client_of(fake, PAGE, "http://localhost:3000", key=KEY)
    evil = with_key.get("/v1/models", headers={"Origin": f"{PAGE}.evil.example", "Authorization": f"Bearer {KEY}"})
    assert ALLOW not in evil.headers
    assert "Origin" in with_key.get("/v1/models", headers={"Origin": PAGE}).headers["Vary"]


def test_any_page_may_call_where_that_is_set(fake: FakeEngine) -> None:
    answer = client_of(fake, "*").get("/v1/models", headers={"Origin": "https://anywhere.example"})
    assert (answer.status_code, answer.headers[ALLOW]) == (200, "*")


@pytest.mark.parametrize("origin", ["app.example.org", f"{PAGE}/", "https://*.org", "HTTPS://A.org", ".*", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValidationError, match="must be like https://app"):
        Settings(cors_origin=(origin,))


def test_a_cache_between_tells_pages_apart(fake: FakeEngine) -> None:
    for headers in ({}, {"Origin": PAGE}, {"Origin": "https://else.example"}):
        assert "Origin" in client_of(fake, PAGE).get("/v1/models", headers=headers).headers["Vary"]
        assert "Vary" not in client_of(fake, "*").get("/v1/models", headers=headers).headers
