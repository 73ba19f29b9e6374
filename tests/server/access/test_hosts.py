"""A page whose name was made to point at a server that needs no key cannot read from it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from server.access.hosts import Hosts
from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine


def status(settings: Settings, fake: FakeEngine, **headers: str) -> int:
    client = create_app(settings, engine=fake).test_client()  # type: ignore[arg-type]
    return client.get("/v1/diagnostics", headers=headers).status_code


def test_a_rebound_name_is_refused_and_told_what_would_help(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    for route in ("/v1/models", "/v1/diagnostics", "/", "/health"):
        answer = client.get(route, headers={"Host": "rebound.example:8000"})
        assert (answer.status_code, answer.json["error"]["code"]) == (403, "host_not_allowed")
        assert "--allow-host" in answer.json["error"]["message"]
    assert client.get("/v1/models", headers={"Host": "localhost", "Origin": "https://page.example"}).status_code == 403
    assert client.get("/v1/models", headers={"Host": "localhost:1", "Origin": "http://localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    ("bound", "header", "allowed"),
    [
        ("127.0.0.1", "localhost", True), ("127.0.0.1", "LOCALHOST.:8000", True), ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "[::1]:8000", True), ("127.0.0.1", "10.0.0.7", True), ("127.0.0.1", "app.localhost", True),
        ("127.0.0.1", "evil.example", False), ("127.0.0.1", "localhost.evil.example", False), ("127.0.0.1", "", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False), ("127.0.0.1", "gpu-box", False), ("127.0.0.1", "a@localhost", False),
        ("127.0.0.1", "localhost:port", False), ("127.0.0.1", "2130706433", False), ("127.0.0.1", "localhost/x", False),
        ("0.0.0.0", "gpu-box:8000", True), ("0.0.0.0", "192.168.1.5:8000", True), ("0.0.0.0", "evil.example", False),
        ("gpu.lan.example", "gpu.lan.example:8000", True), ("gpu.lan.example", "evil.example", False),
    ],
)  # fmt: skip
def test_the_hosts_of_a_server_follow_from_what_it_is_bound_to(bound: str, header: str, allowed: bool) -> None:
    assert Hosts(Settings(host=bound)).allows_host(header) == allowed


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True), ("http://127.0.0.1:8000", "localhost:8000", True),
        ("null", "localhost", False), ("https://evil.example", "localhost", False), ("http://6.6.6.6", "localhost", False),
        ("http://6.6.6.6:8000", "6.6.6.6:8000", True), ("", "localhost", False), ("localhost", "localhost", False),
    ],
)  # fmt: skip
def test_only_the_servers_own_pages_may_ask(origin: str, host: str, allowed: bool) -> None:
    assert Hosts(Settings()).allows_origin(origin, host) == allowed


def test_further_names_are_settings(fake: FakeEngine) -> None:
    settings = Settings(allow_host=("chat.example", "*.lan.example"))
    hosts = Hosts(settings)
    assert [hosts.allows_host(name) for name in ("chat.example", "a.lan.example", "lan.example", "b.chat.example")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert hosts.allows_origin("https://chat.example", "127.0.0.1:8000")
    assert Hosts(Settings(allow_host=("*",))).allows_host("anything.example")
    with pytest.raises(ValidationError, match="without scheme"):
        Settings(allow_host=("https://chat.example",))


def test_a_key_is_enough_unless_names_are_stated(fake: FakeEngine) -> None:
    keys = ("k" * 8,)
    authorized = {"Host": "published.example", "Authorization": "Bearer " + keys[0], "Origin": "https://page.example"}
    assert status(Settings(host="0.0.0.0", api_keys=keys), fake, **authorized) != 403  # type: ignore[arg-type]
    assert status(Settings(api_keys=keys, allow_host=("other.example",)), fake, **authorized) == 403  # type: ignore[arg-type]
