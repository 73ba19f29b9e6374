"""Newly registered interventions and readouts have rows, columns and filters in the journal."""

from __future__ import annotations

import json

import pytest

import steering
from server.journal.entry import Entry
from server.wire.chat import ChatRequest, with_interventions
from server.wire.parse import parse
from steering.protocol import intervention, readout
from tests.server.conftest import ask, user
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import NOTHING_SAID
from tests.server.journal.rows import Serve, journal_of, rows_of
from tests.toys.odd import Odd
from tests.toys.whisper import Whisper

NUDGE = {"nudge": {"whisper": "a private word"}}


def test_what_is_registered_has_its_rows_and_filters(
    fake: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(intervention.REGISTRY, Whisper.name(), (Whisper, None))
    monkeypatch.setitem(readout.REGISTRY, Odd.name, Odd())
    client = serve(fake)
    plain = ask(client).json["id"]
    chat = parse(json.dumps({"messages": [user("hi")], "toys": NUDGE}).encode(), with_interventions(ChatRequest))
    asked = [steering.Vcd(), Whisper(whisper="a private word"), steering.See()]
    request = steering.Request([], interventions=asked)
    entry = Entry.of(journal_of(client), chat, request, "chatcmpl-toy", "m", 3)
    assert entry is not None
    applied = {"toys": {"nudge": {"by": 1.0, "whisper": "a private word", "steps": [0.1, 0.2]}}}
    diagnostics = {"version": 2, "norm": {"value": 2.5, "odd": True}}
    entry.finished(steering.Choice(0, "", (), "stop", None, applied, diagnostics), 0.1, 0.2)
    entry.given_up(1, "error", 0, "", None, 0.2)

    broken, row, _ = rows_of(client, 3)
    assert row["interventions"] == ["contrast.vcd", "toys.nudge", "sage.see"]
    assert row["asked"]["toys"] == {"nudge": {"whisper": "(14 characters)"}}
    assert row["applied"] == {"toys": {"nudge": {"by": 1.0, "whisper": "(14 characters)", "steps": 2}}}
    assert row["diagnostics"] == NOTHING_SAID | {"norm": 2.5, "odd": True}
    assert broken["diagnostics"] == NOTHING_SAID | {"norm": None, "odd": None}
    for query, expected in (
        ("intervention=toys.nudge&flag=odd", ["chatcmpl-toy"]),
        ("intervention=toys.nudge&sage=see&contrast=vcd", ["chatcmpl-toy"] * 2),
        ("intervention=none", [plain]),
    ):
        found = client.get(f"/v1/diagnostics?{query}")
        assert [one["id"] for one in found.json["data"]] == expected, query
    assert "toys.nudge" in client.get("/v1/diagnostics?intervention=nudge").json["error"]["message"]
    groups = client.get("/v1/diagnostics/summary").json["by_intervention"]
    assert [group["intervention"] for group in groups] == ["sage+contrast:vcd+toys", "none"]
