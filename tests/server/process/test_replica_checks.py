"""Settings that several replicas do not support are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from server.process import replica_checks as checks
from server.settings import Settings, SettingsError


@pytest.fixture(autouse=True)
def _with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2, "host": "unix:/tmp/a.sock"}, "--host unix:/tmp/a.sock: with --replicas, Ray Serve's proxy"),
        ({"replicas": 2, "port": 0}, "--port 0: Ray Serve's proxy does not report"),
        ({"replicas": 2, "device": "cuda:1"}, "--device cuda:1: Ray gives each replica its own GPU"),
        ({"replicas": 2, "device_map": "auto"}, "--device-map auto: Ray gives each replica a single GPU"),
        ({"replicas": 2, "tensor_parallel": 2}, "--tensor-parallel 2: leave --replicas out"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2 is less than --replicas 3"),
        ({"max_replicas": 2}, "--max-replicas needs --replicas"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        checks.check(Settings(**fields))
    assert str(caught.value).startswith(message)


def test_what_fits_passes() -> None:
    checks.check(Settings())
    checks.check(Settings(replicas=2, max_replicas=2))


def test_without_the_extra_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "starlette" else name)
    with pytest.raises(SettingsError, match=r"starlette is missing: pip install 'helmsight\[ray\]'"):
        checks.check(Settings(replicas=2))
    checks.check(Settings())
