"""The journal records presets and skipped fields; the metrics do not."""

from __future__ import annotations

from server.settings import PresetTable
from tests.server.conftest import ask
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Serve, rows_of


def test_a_row_names_the_preset_beside_what_it_asked_for(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake, presets={"calm": PresetTable(fields={"sage": {"generate": False}, "temperature": 0.5})})
    ask(client, "hi", temperature=None, model="fake@calm")
    ask(client, "hi", sage=True, strict=False)
    ask(client, "hi")
    plain, lenient, named = rows_of(client, 3)
    assert named["asked"] == {**plain["asked"], "sage": {"generate": False}, "preset": "calm"}
    assert named["sampling"]["temperature"] == 0.5
    assert (named["model"], named["interventions"]) == ("fake", ["sage.see", "sage.think"])
    assert lenient["asked"] == {**plain["asked"], "sage": True}
    assert len(client.get("/v1/diagnostics?model=fake").json["data"]) == 3
    assert "calm" not in client.get("/metrics").text


def test_what_was_skipped_is_told_without_its_texts(fake: FakeEngine, serve: Serve) -> None:
    fake.can(interventions=frozenset())
    client = serve(fake)
    ask(client, "hi", strict=False, contrast={"kind": "icd", "instruction": "a very private instruction"})
    (row,) = rows_of(client, 1)
    assert row["asked"]["skipped"] == ["contrast"]
    assert row["asked"]["contrast"] == {"kind": "icd", "instruction": "(26 characters)"}
    assert row["interventions"] == []
