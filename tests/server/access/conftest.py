"""Applications whose keys stand in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from server.access.named import NamedKey, new_key, read, write
from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine

Locked = Callable[..., Flask]


class KeyFile:
    """A file of named keys. `add` returns the header that shows the new one."""

    def __init__(self, path: Path):
        self.path = path
        write(path, ())

    def add(self, name: str, *roles: str, **limits: Any) -> dict[str, str]:
        key, kept = new_key(name, roles, **limits)
        self.put(*(one for one in read(self.path) if one.name != name), kept)
        return {"Authorization": f"Bearer {key}"}

    def put(self, *keys: NamedKey) -> None:
        write(self.path, keys)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """Return a file without keys."""
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
def locked(keys: KeyFile, fake: FakeEngine) -> Locked:
    """Return a function that makes applications that ask for the keys of that file."""

    def make(**settings: Any) -> Flask:
        return create_app(Settings(named_key_file=str(keys.path), vectors=(), **settings), engine=fake)  # type: ignore[arg-type]

    return make
