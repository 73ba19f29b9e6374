"""A home of their own for commands that write there."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(undrawn: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home folder for the test, where the probe writes by default."""
    for name in ("HELMSIGHT_VECTORS", "HELMSIGHT_CONFIG", "HELMSIGHT_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"
