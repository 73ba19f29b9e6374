"""The names of all metrics that a server can show: with a journal, and with a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import steering
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
    for served in (engine, lacking):
        settings = Settings(journal=str(folder / "journal.db"))
        said = create_app(settings, engine=served).test_client().get("/metrics").text  # type: ignore[arg-type]
        found |= dict(re.findall(r"(?m)^# TYPE (\w+) (\w+)$", said))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}
