"""Truths that come behind their answers: for every dialect, whether or not the answer was stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import select

from server.access.named import NamedKey, digest_of, write
from server.journal.schema import ROWS
from tests.server.conftest import user
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Serve, database_of, journal_of


def truth_of(client: FlaskClient, identity: str) -> bool | None:
    with database_of(client).engine.connect() as connection:
        (found,) = connection.execute(select(ROWS.c.answer_correct).where(ROWS.c.id == identity)).scalars()
    return found  # type: ignore[no-any-return]


def test_truths_come_later_for_responses_and_messages(serve: Serve, live: Callable[[Flask], str]) -> None:
    client = serve()
    url = live(client.application)
    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    response = ours.responses.create(model="helmsight-demo", input="Why?", store=True, metadata={"shop": "a"})
    unstored = ours.responses.create(model="helmsight-demo", input="Why?", max_output_tokens=4)
    asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}], "metadata": {"user_id": "u"}}
    message = client.post("/v1/messages", json=asked).json["id"]
    for identity, before in ((response.id, {"shop": "a"}), (unstored.id, {}), (message, {"user_id": "u"})):
        assert truth_of(client, identity) is None
        for right in ("true", "false"):
            rows: Any = ours.post(
                f"/diagnostics/{identity}", body={"metadata": {"answer_correct": right}}, cast_to=dict[str, Any]
            )
            assert rows["data"][0]["metadata"] == before | {"answer_correct": right}
            assert truth_of(client, identity) is (right == "true")
    kept = ours.responses.retrieve(response.id)
    assert kept.metadata == {"shop": "a", "answer_correct": "false"}
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/diagnostics/\{id\}"):
        ours.chat.completions.update(response.id, metadata={"answer_correct": "true"})


def test_a_message_may_say_at_once_whether_its_answer_will_be_right(serve: Serve) -> None:
    client = serve()
    asked = {"model": "helmsight-demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}
    made = client.post("/v1/messages", json={**asked, "metadata": {"answer_correct": "false"}}).json
    assert "ignored" not in made
    journal_of(client).settle_all()
    assert truth_of(client, made["id"]) is False
    wrong = client.post("/v1/messages", json={**asked, "metadata": {"answer_correct": "no"}})
    assert (wrong.status_code, wrong.json["error"]["param"]) == (400, "metadata")


def test_a_named_key_judges_its_own_answers_and_a_key_of_the_settings_any(
    fake: FakeEngine, serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    keys = {"ann": "ann-0123456789", "eve": "eve-0123456789"}
    roles = {"ann": ("use",), "eve": ("use", "journal")}
    write(file, [NamedKey(name=name, digest=digest_of(key), roles=roles[name]) for name, key in keys.items()])
    client = serve(fake, named_key_file=str(file), api_keys=("root-0123456789",))

    def sent(key: str, path: str, body: Any) -> Any:
        return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    made = sent(keys["ann"], "/v1/chat/completions", {"messages": [user("hi")], "store": True}).json["id"]
    right = {"metadata": {"answer_correct": "true"}}
    assert sent(keys["eve"], f"/v1/diagnostics/{made}", right).status_code == 404
    assert truth_of(client, made) is None
    assert sent(keys["ann"], f"/v1/diagnostics/{made}", right).status_code == 200
    wrong = {"metadata": {"answer_correct": "false"}}
    assert sent("root-0123456789", f"/v1/diagnostics/{made}", wrong).status_code == 200
    assert truth_of(client, made) is False
    assert sent("root-0123456789", "/v1/diagnostics/chatcmpl-0", wrong).status_code == 404
    many = {"metadata": {str(number): "x" for number in range(16)}}
    refused = sent(keys["ann"], f"/v1/diagnostics/{made}", many)
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "metadata")
    assert truth_of(client, made) is False
