"""Limits of a key: chats within a period, and chats at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import SecretStr

from server.access.limiter import Limiter
from server.access.named import rate_of
from server.access.ring import Holder
from server.errors import ApiError
from steering import Fault
from tests.server.access.conftest import KeyFile, Locked
from tests.server.conftest import user
from tests.server.fakes import FakeEngine
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
BODY = {"messages": [user("hi")]}


def chat(client: FlaskClient, headers: dict[str, str], **fields: Any) -> Any:
    return client.post(CHAT, json=BODY | fields, headers=headers, buffered=True)


def test_a_key_has_its_chats_in_a_time_and_others_have_theirs(keys: KeyFile, locked: Locked) -> None:
    client = locked().test_client()
    app, other = keys.add("app", rate="2/minute"), keys.add("other", rate="1/minute")
    assert [chat(client, app).status_code for _ in range(2)] == [200, 200]
    assert client.get("/v1/models", headers=app).status_code == 200  # the rate is of chats alone
    refused = chat(client, app)
    assert refused.status_code == 429
    assert refused.json["error"]["code"] == "key_rate_exceeded"
    assert refused.json["error"]["type"] == "rate_limit_error"
    seconds = int(refused.headers["Retry-After"])
    said = f"The key 'app' may send at most 2 chats in a minute; the next one in {seconds} seconds."
    assert refused.json["error"]["message"] == said
    assert 50 < seconds <= 60
    assert chat(client, other).status_code == 200
    replaced = keys.add("app", rate="2/minute")  # a new key of the name has no new share
    assert chat(client, replaced).status_code == 429


def test_what_is_left_is_told_in_the_headers_of_openai_and_anthropic(keys: KeyFile, locked: Locked) -> None:
    client = locked().test_client()
    app, free = keys.add("app", rate="2/minute"), keys.add("free")
    told = []
    for _ in range(3):
        headers = chat(client, app).headers
        told.append((headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]))
        assert 50 < int(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        assert headers["anthropic-ratelimit-requests-remaining"] == headers["x-ratelimit-remaining-requests"]
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert told == [("2", "1"), ("2", "0"), ("2", "0")]
    turns = {"messages": [user("hi")], "max_tokens": 2}
    assert client.post("/v1/messages", json=turns, headers=app).status_code == 429, "all dialects share a rate"
    assert client.post("/v1/responses", json={"input": "hi"}, headers=app).status_code == 429
    assert "x-ratelimit-limit-requests" not in chat(client, free).headers
    assert "x-ratelimit-limit-requests" not in client.get("/v1/models", headers=app).headers


def test_a_clock_that_is_set_back_locks_no_key_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, holder = Limiter(), Holder("app", "app", rate=rate_of("2/minute"))
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])

    def taken() -> bool:
        try:
            limiter.enter(holder)
        except ApiError:
            return False
        return True

    assert [taken() for _ in range(3)] == [True, True, False]
    ahead[0] = -2.0  # a drift gives no new share
    assert not taken()
    ahead[0] = 86_400.0
    assert [taken() for _ in range(3)] == [True, True, False]
    ahead[0] = 0.0  # the time is right again, and what was counted lies a day ahead
    assert [taken() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_has_its_chats_at_once_until_the_last_byte(
    keys: KeyFile, locked: Locked, fake: FakeEngine, stream: bool
) -> None:
    client, app = locked().test_client(), keys.add("app", concurrent=2, rate="100/minute")
    go_on = threading.Event()
    fake.script = ("Hel", go_on, "lo")
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(chat, client, app, stream=stream) for _ in range(2)]
        wait_for(lambda: len(fake.completions) == 2)
        refused = chat(client, app)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json["error"]["code"] == "key_concurrency_exceeded"
        said = "at most 2 requests at the same time; try again when one of them has ended."
        assert refused.json["error"]["message"].endswith(said)
        go_on.set()
        assert [one.result().status_code for one in running] == [200, 200]
    assert [chat(client, app).status_code for _ in range(4)] == [200] * 4
    assert client.post(CHAT, json={"messages": 1}, headers=app).status_code == 400  # gives its place back, too
    assert [chat(client, app).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_guarded_chat_holds_its_place_until_the_last_try(
    keys: KeyFile, locked: Locked, fake: FakeEngine, stream: bool
) -> None:
    client, app = locked().test_client(), keys.add("app", concurrent=1, rate="2/minute")
    go_on, submit = threading.Event(), fake.submit
    fake.diagnostics = {"confidence": {"mean_logprob": -1.0, "least_logprob": -2.0}}
    guard = {"when": {"mean_logprob": "< 0"}, "then": {"temperature": 1}}

    def again(request: Any) -> Any:
        fake.script = ("Two", go_on) if fake.requests else ("One",)
        return submit(request)

    fake.submit = again  # type: ignore[method-assign]

    def post() -> Any:
        return chat(client, app, guard=guard, stream=stream)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post)
        wait_for(lambda: len(fake.completions) == 2)
        assert post().json["error"]["code"] == "key_concurrency_exceeded"
        go_on.set()
        assert running.result().status_code == 200
    assert fake.groups == ["name:app"] * 2, "a retry queues among its key's requests"
    assert post().status_code == 200, "both tries count as one chat"
    assert post().json["error"]["code"] == "key_rate_exceeded"


@pytest.mark.parametrize(("script", "status"), [(("Hel", "lo"), 200), (("Hel", Fault("broken")), 500)])
def test_the_place_is_free_when_the_client_hears_of_the_end(
    keys: KeyFile, locked: Locked, fake: FakeEngine, script: tuple[Any, ...], status: int
) -> None:
    """And not only once the server has closed the answer, which nothing here does."""
    client, app = locked().test_client(), keys.add("app", concurrent=1)
    fake.script = script
    assert [client.post(CHAT, json=BODY, headers=app).status_code for _ in range(2)] == [status] * 2
    for _ in range(2):
        pieces = client.post(CHAT, json=BODY | {"stream": True}, headers=app).iter_encoded()
        assert any(b"[DONE]" in piece or b'"error"' in piece for piece in pieces)
        assert client.post(CHAT, json=BODY, headers=app).status_code == status


def test_a_place_is_given_back_once_and_a_refusal_takes_no_share() -> None:
    limiter = Limiter()
    holder = Holder("app", "app", rate=rate_of("3/hour"), concurrent=1)
    leave = limiter.enter(holder)
    with pytest.raises(Exception, match="requests at the same time"):
        limiter.enter(holder)
    leave()
    leave()
    limiter.enter(holder)
    with pytest.raises(Exception, match="requests at the same time"):
        limiter.enter(holder)
    loose = Holder("app", "app", rate=rate_of("3/hour"))
    limiter.enter(loose)
    with pytest.raises(Exception, match="3 chats in an hour"):
        limiter.enter(loose)


@pytest.mark.parametrize(
    ("text", "count", "seconds"), [("60/minute", 60, 60), ("5/10 seconds", 5, 10), ("1000 per day", 1000, 86_400)]
)
def test_rates_are_read(text: str, count: int, seconds: int) -> None:
    assert (rate_of(text).amount, rate_of(text).get_expiry()) == (count, seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60",
        "0/minute",
        "-1/minute",
        "1/day; 5/second",
        "5/0 minutes",
        "5 per 00 days",
        "2/9999 days",
        "9999999999/day",
    ],
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a rate is written as"):
        rate_of(text)


def test_metrics_and_journal_tell_what_was_refused_and_whose_it_was(
    keys: KeyFile, locked: Locked, tmp_path: Any
) -> None:
    app = locked(journal=SecretStr(str(tmp_path / "journal.db")))
    client, header = app.test_client(), keys.add("app", rate="1/hour")
    reader = keys.add("reader", "journal")
    assert [chat(client, header).status_code for _ in range(3)] == [200, 429, 429]
    assert client.get("/v1/diagnostics", headers=header).status_code == 403
    said = client.get("/metrics", headers=reader).text
    assert 'helmsight_key_requests_total{key="app",status="200"} 1.0' in said
    assert 'helmsight_key_requests_total{key="app",status="429"} 2.0' in said

    def refusals() -> Any:
        return client.get("/v1/diagnostics/summary", headers=reader).json["refusals"]

    wait_for(lambda: refusals()["count"] >= 2)
    assert refusals()["by_code"] == [{"status": 429, "code": "key_rate_exceeded", "route": CHAT, "count": 2}], (
        "but not that of the journal itself"
    )
    (row,) = client.get("/v1/diagnostics?key_name=app", headers=reader).json["data"]
    assert row["key_name"] == "app"
    assert client.get("/v1/diagnostics?key_name=reader", headers=reader).json["data"] == []
    head, first = client.get("/v1/diagnostics?format=csv", headers=reader).text.splitlines()[:2]
    assert first.split(",")[head.split(",").index("key_name")] == "app"
    assert header["Authorization"].removeprefix("Bearer ").encode() not in (tmp_path / "journal.db").read_bytes()
    app.extensions["helmsight"].journal.close()


def test_what_is_asked_with_one_key_waits_in_one_group(keys: KeyFile, locked: Locked, fake: FakeEngine) -> None:
    client = locked(api_keys=(SecretStr("sk-0123456789"), SecretStr("sk-9876543210"))).test_client()
    plain = [{"Authorization": f"Bearer sk-{digits}"} for digits in ("0123456789", "9876543210")]
    app, other = keys.add("app"), keys.add("other")
    for header in (app, other, app, *plain):
        assert chat(client, header).status_code == 200
    first, second, again, *rest = fake.groups
    assert first == again
    assert len({first, second, *rest}) == 4
    assert not any("0123456789" in group for group in fake.groups)
