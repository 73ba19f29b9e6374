"""The model that is served, and the plain path beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.served.kinds import Kind, kinds
from tests.server.served.model import LAYERS, served_model
from tests.server.served.serving import Plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    path = Plain(folder)
    yield path
    path.close()


@pytest.fixture(scope="module")
def every(plain: Plain) -> list[Kind]:
    return kinds(plain.app.extensions["helmsight"].presets.chats, LAYERS, plain.presets)
