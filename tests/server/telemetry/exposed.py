"""The names of all metrics that a server can show: with a journal, and with a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import steering
from server.app import create_app
from server.settings import Settings
from server.telemetry import collectors
from tests.server.fakes import FakeEngine


def families(engine: steering.Engine, folder: Path) -> dict[str, str]:
    """The type of every metric, by the name that its samples have."""
    lacking = FakeEngine()
    lacking.can(device="cuda:0")
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"mem_get_info": (1, 2), "memory_allocated": 1, "memory_reserved": 1}
        calls = {name: lambda device, size=size: size for name, size in sizes.items()}
        patch.setattr(collectors.torch, "cuda", SimpleNamespace(**calls))
        for served in (engine, lacking):
            settings = Settings(journal=str(folder / "journal.db"))
            said = create_app(settings, engine=served).test_client().get("/metrics").text  # type: ignore[arg-type]
            found |= dict(re.findall(r"(?m)^# TYPE (\w+) (\w+)$", said))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}
