"""A clock that jumps an hour ahead and back again while a server runs: keys, answers, their ids and their rows go on."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from server.access.named import new_key, write
from server.app import create_app
from server.journal import writer
from server.settings import Settings
from tests.server.conftest import ask, user
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import settled

HOUR = 3600.0
CHAT = "/v1/chat/completions"
MODES = (False, True)


class WallClock:
    """A replacement for `time.time`: the real time, moved `ahead` by some seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ahead = 0.0
        self._real = time.time
        monkeypatch.setattr(time, "time", lambda: self._real() + self.ahead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def test_no_key_is_locked_out_whichever_way_the_clock_jumps(clock: WallClock, tmp_path: Path) -> None:
    """A share for each jump and no more, and nobody is locked out for the hour."""
    file = tmp_path / "keys.json"
    key, kept = new_key("app", rate="3/minute", concurrent=2)
    write(file, [kept])
    engine = FakeEngine()
    app = create_app(Settings(named_key_file=str(file), vectors=()), engine=engine)  # type: ignore[arg-type]
    client, head = app.test_client(), {"Authorization": f"Bearer {key}"}
    for ahead in (0.0, HOUR, 0.0, -HOUR, HOUR):
        clock.ahead = ahead
        answers = [client.post(CHAT, json={"messages": [user("hi")]}, headers=head, buffered=True) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429], ahead
        assert 0 < int(answers[-1].headers["Retry-After"]) <= 60
        assert answers[-1].json["error"]["code"] == "key_rate_exceeded", "and no place is held for ever"


def test_answers_have_ids_of_their_own_and_rows_that_stay(
    clock: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are kept for half an hour: by a clock that is an hour ahead, those of before are too old."""
    monkeypatch.setattr(writer, "PRUNE_SECONDS", 0.0)
    settings = Settings(journal=str(tmp_path / "journal.db"), journal_days=0.5 / 24, request_timeout=60.0, vectors=())
    client = create_app(settings, engine=FakeEngine("Hello")).test_client()  # type: ignore[arg-type]
    journal = client.application.extensions["helmsight"].journal
    journal.database()
    identities: list[str] = []
    for ahead in (0.0, HOUR, 0.0):
        clock.ahead = ahead
        for stream in MODES:
            said, identity = answered(client, stream)
            assert said == "Hello"
            identities.append(identity)
    settled(journal, len(identities))
    assert len(set(identities)) == len(identities)
    rows = client.get("/v1/diagnostics?limit=100").json["data"]
    assert [row["id"] for row in rows] == identities[::-1], "those that ended last come first"
    assert all(0 <= row["latency"]["total"] < 60 for row in rows), "times go by a clock that does not jump"
    summary = client.get("/v1/diagnostics/summary")
    assert summary.status_code == 200
    journal.close()


def test_a_stream_that_may_take_a_minute_outlives_a_jump_of_an_hour(clock: WallClock) -> None:
    go_on = threading.Event()
    engine = FakeEngine("one", go_on, " two")
    client = create_app(Settings(request_timeout=60.0, vectors=()), engine=engine).test_client()  # type: ignore[arg-type]
    pieces = iter(client.post(CHAT, json={"messages": [user("hi")], "stream": True}).response)
    text = ""
    while "one" not in text:
        text += next(pieces).decode()  # type: ignore[union-attr]
    clock.ahead = HOUR
    assert not engine.completions[0].cancelled.wait(1.0), "the watcher has looked at it"
    clock.ahead = 0.0
    go_on.set()
    text += "".join(piece.decode() for piece in pieces)  # type: ignore[union-attr]
    assert "[DONE]" in text
    assert re.findall(r'"content":"([^"]+)"', text) == ["one", " two"]


def answered(client: FlaskClient, stream: bool) -> tuple[str, str]:
    """Return an answer's text and id."""
    answer = ask(client, "hi", stream=stream)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json["choices"][0]["message"]["content"], answer.json["id"]
    (identity,) = set(re.findall(r'"id":"([^"]+)"', answer.text))
    return "".join(re.findall(r'"content":"([^"]+)"', answer.text)), identity
