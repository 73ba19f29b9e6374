"""An engine that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steering import Engine
from tests.steering.conftest import MakeEngine


@pytest.fixture
def running(make_engine: MakeEngine) -> Iterator[Engine]:
    engine = make_engine("qwen2_vl", slots=3, max_waiting=64)
    engine.start()
    yield engine
    engine.stop()
