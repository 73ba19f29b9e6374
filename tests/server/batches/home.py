"""A user's home and working folder in a test, where commands load the model with one thread and compile nothing."""

from __future__ import annotations

from pathlib import Path

import pytest


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what follows in a folder that is home as well."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("HELMSIGHT_THREADS", "1")
    monkeypatch.setenv("HELMSIGHT_SLOTS", "4")
    monkeypatch.setenv("HELMSIGHT_COMPILED", "false")
    monkeypatch.setenv("HELMSIGHT_JOURNAL", str(folder / "journal.db"))
