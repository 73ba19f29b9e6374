"""The model that programs beside the tests are asked of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.steering.parallel.asking import small


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("small") / "model")
