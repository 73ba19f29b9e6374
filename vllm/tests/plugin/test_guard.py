"""The guard of all routes: without the key nothing but /health answers, and without the variable all is as in vLLM."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from helmsight_vllm.routes import HelmsightRoutes


def client(monkeypatch: pytest.MonkeyPatch, guard: str) -> TestClient:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HELMSIGHT_GUARD", guard)
    app = FastAPI()
    for path in ("/health", "/invocations", "/metrics"):
        app.add_api_route(path, lambda: "answered", methods=["GET"])
    HelmsightRoutes().attach_router(app)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/invocations", "/metrics", "/v1/helmsight/facts", "/docs", "//health"])
@pytest.mark.parametrize("key", [None, "", "Bearer ", "Bearer other", "secret"])
def test_routes_ask_for_the_key(monkeypatch: pytest.MonkeyPatch, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    assert client(monkeypatch, "1").get(path, headers=headers).status_code == 401


def test_health_is_open_and_whoever_has_the_key_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = client(monkeypatch, "1")
    assert guarded.get("/health").json() == "answered"
    assert guarded.get("/invocations", headers={"Authorization": "Bearer secret"}).json() == "answered"


def test_routes_are_open_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client(monkeypatch, "0").get("/invocations").json() == "answered"
