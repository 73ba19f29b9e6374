"""The names of all metrics that a server can show: with a journal, a key that expires, and a GPU."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import steering
from server.access.named import new_key, write
from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine


def families(engine: steering.Engine, folder: Path) -> dict[str, str]:
    """Return the type of every metric, by the name that its samples have."""
    lacking = FakeEngine()
    found: dict[str, str] = {}
    memory = dict.fromkeys(
        (f"gpu_memory_{kind}_bytes cuda:0" for kind in ("allocated", "reserved", "free", "total")), 1.0
    )
    lacking.numbers |= {**memory, "resident_bytes": 1.0}  # of an engine with a GPU, in a process of its own
    key, stored = new_key("prometheus", ["journal"], expires=datetime(2099, 1, 1, tzinfo=UTC))
    write(folder / "keys.json", [stored])
    for served in (engine, lacking):
        settings = Settings(
            journal=str(folder / "journal.db"), journal_readouts=("focus",), named_key_file=str(folder / "keys.json")
        )
        client = create_app(settings, engine=served).test_client()  # type: ignore[arg-type]
        said = client.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        found |= dict(re.findall(r"(?m)^# TYPE (\w+) (\w+)$", said))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}
