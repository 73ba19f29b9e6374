"""Permissions of each key, and keys that are added and removed while the server runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from pydantic import SecretStr

from server.access.auth import OPEN_FOLDER, OPEN_ROUTES, roles_for
from server.app import create_app
from server.settings import Settings, SettingsError, warnings_for
from tests.server.access.conftest import KeyFile, Locked
from tests.server.conftest import user
from tests.server.fakes import FakeEngine

CHAT = "/v1/chat/completions"
HEAD = '{"format": "helmsight.keys/1", "keys":'
BODY = {"messages": [user("hi")]}


def codes(client: FlaskClient, headers: dict[str, str]) -> dict[str, str | None]:
    """Return the error code that a request of each kind gets, None for an answer."""
    asked = {
        "chat": client.post(CHAT, json=BODY, headers=headers),
        "models": client.get("/v1/models", headers=headers),
        "journal": client.get("/v1/diagnostics", headers=headers),
        "metrics": client.get("/metrics", headers=headers),
        "vectors": client.get("/v1/steering/vectors", headers=headers),
        "upload": client.post("/v1/steering/vectors?name=x", data=b"x", headers=headers),
        "delete": client.delete("/v1/steering/vectors/x", headers=headers),
    }
    return {name: answer.json["error"]["code"] if answer.status_code >= 400 else None for name, answer in asked.items()}


def test_a_key_opens_what_its_roles_are_for(keys: KeyFile, locked: Locked) -> None:
    client = locked(journal=SecretStr("off")).test_client()
    no = "missing_role"
    closed = {"upload": no, "delete": no}
    off = {"upload": "uploads_disabled", "delete": "uploads_disabled"}
    assert codes(client, keys.add("app")) == {
        "chat": None, "models": None, "vectors": None, "journal": no, "metrics": no, **closed,
    }  # fmt: skip
    assert codes(client, keys.add("prometheus", "journal")) == {
        "chat": no, "models": no, "vectors": no, "journal": "journal_off", "metrics": None, **closed,
    }  # fmt: skip
    assert codes(client, keys.add("lab", "vectors")) == {
        "chat": no, "models": no, "vectors": None, "journal": no, "metrics": no, **off,
    }  # fmt: skip
    every = codes(client, keys.add("all", "use", "journal", "vectors"))
    assert no not in every.values()


def test_a_key_without_the_journal_sees_the_rows_of_its_own_answers(
    keys: KeyFile, locked: Locked, tmp_path: Path
) -> None:
    client = locked(journal=SecretStr(str(tmp_path / "journal.db"))).test_client()
    first, other, reader = keys.add("app"), keys.add("other"), keys.add("reader", "journal")
    answer = client.post(CHAT, json=BODY, headers=first).json["id"]
    rows = {
        name: client.get(f"/v1/diagnostics/{answer}", headers=key)
        for name, key in (("own", first), ("other", other), ("reader", reader))
    }
    assert {name: found.status_code for name, found in rows.items()} == {"own": 200, "other": 404, "reader": 200}
    assert rows["own"].json == rows["reader"].json
    assert [row["key_name"] for row in rows["own"].json["data"]] == ["app"]
    assert client.get("/v1/diagnostics", headers=first).status_code == 403
    client.application.extensions["helmsight"].journal.close()


def test_a_missing_role_is_named(keys: KeyFile, locked: Locked) -> None:
    client = locked().test_client()
    refused = client.get("/v1/diagnostics", headers=keys.add("app"))
    assert refused.status_code == 403
    assert refused.json["error"]["type"] == "permission_error"
    assert refused.json["error"]["message"] == "The key 'app' lacks the role 'journal', which this needs."
    lists = client.get("/v1/steering/vectors", headers=keys.add("prometheus", "journal"))
    assert "the role 'use' or 'vectors'" in lists.json["error"]["message"]


def test_every_route_has_the_role_that_was_thought_of(locked: Locked) -> None:
    rules = {
        (rule.rule, method): roles_for(rule.rule, method)
        for rule in locked().url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if rule.rule not in OPEN_ROUTES and not rule.rule.startswith(OPEN_FOLDER)
    }
    journal = {"/metrics", "/v1/diagnostics", "/v1/diagnostics/summary"}
    assert {rule for (rule, _), roles in rules.items() if roles == ("journal",)} == journal
    assert rules["/v1/diagnostics/<identity>", "GET"] == ("journal", "use")
    assert {one for one, roles in rules.items() if roles == ("vectors",)} == {
        ("/v1/steering/vectors", "POST"),
        ("/v1/steering/vectors/<name>", "DELETE"),
    }
    assert (CHAT, "POST") in {one for one, roles in rules.items() if roles == ("use",)}


def test_the_probes_and_pages_stay_open_and_a_file_without_keys_opens_nothing(keys: KeyFile, locked: Locked) -> None:
    client = locked().test_client()
    assert client.get("/ready").status_code == 200
    assert client.get("/dashboard").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer hs-guessed"}).status_code == 401
    public = Settings(host="0.0.0.0", named_key_file=str(keys.path))
    assert warnings_for(public) == []


def test_keys_come_and_go_without_a_restart(keys: KeyFile, locked: Locked) -> None:
    client = locked().test_client()
    first, other = keys.add("app"), keys.add("other")
    assert client.get("/v1/models", headers=first).status_code == 200
    second = keys.add("app")  # the same name: the first is no longer accepted
    assert client.get("/v1/models", headers=first).status_code == 401
    assert client.get("/v1/models", headers=second).status_code == 200
    keys.put()
    assert [client.get("/v1/models", headers=one).status_code for one in (second, other)] == [401, 401]


@pytest.mark.parametrize("damage", ["{", '{"format": "other"}', f'{HEAD} [{{"name": "x"}}]}}', None])
def test_a_broken_file_keeps_the_keys_that_were_known(
    keys: KeyFile, locked: Locked, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    client, header = locked().test_client(), keys.add("app")
    assert client.get("/v1/models", headers=header).status_code == 200
    if damage is None:
        keys.path.unlink()
    else:
        keys.path.write_text(damage)
    with caplog.at_level(logging.ERROR, "helmsight"):
        for _ in range(3):
            assert client.get("/v1/models", headers=header).status_code == 200
    (said,) = caplog.messages  # once, not with every request
    assert str(keys.path) in said
    assert said.endswith("; the 1 keys read before stay valid")
    keys.put()
    assert client.get("/v1/models", headers=header).status_code == 401


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("[]", "must have 'format'"),
        (
            '{"format": "helmsight.keys/1", "keys": [{"name": "x", "digest": "00", "roles": ["use"]}]}',
            "'digest': is no digest",
        ),
    ],
)
def test_a_server_does_not_start_with_a_broken_file(
    tmp_path: Path, fake: FakeEngine, content: str | None, said: str
) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=said) as refused:
        create_app(Settings(named_key_file=str(path)), engine=fake)  # type: ignore[arg-type]
    assert str(path) in str(refused.value)


def test_keys_of_the_settings_stay_without_roles_and_limits(keys: KeyFile, locked: Locked) -> None:
    client = locked(api_keys=(SecretStr("sk-0123456789"),), journal=SecretStr("off")).test_client()
    plain = {"Authorization": "Bearer sk-0123456789"}
    assert "missing_role" not in codes(client, plain).values()
    assert all(client.post(CHAT, json=BODY, headers=plain).status_code == 200 for _ in range(5))
    assert codes(client, keys.add("app"))["metrics"] == "missing_role"
