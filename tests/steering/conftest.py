"""Loaded tiny models, once a session: patched for the engine, and plain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import steering
from tests import families
from tests.steering.plain import Plain

MakeEngine = Callable[..., steering.Engine]


@pytest.fixture(scope="session")
def load_mllm(root: Path) -> Callable[[str], steering.MLLM]:
    """family -> its patched model; shared, so a test that changes one must change it back."""
    return functools.cache(lambda family: steering.load(families.checkpoint(family, root), device="cpu"))


@pytest.fixture(scope="session")
def load_plain(root: Path) -> Callable[[str], Plain]:
    """family -> its plain model."""
    return functools.cache(lambda family: Plain(families.checkpoint(family, root)))


@pytest.fixture(scope="session")
def make_engine(load_mllm: Callable[[str], steering.MLLM]) -> MakeEngine:
    """(family, **options) -> an engine of a few slots; the self-check has tests of its own."""

    def make(family: str, **options: Any) -> steering.Engine:
        settings: dict[str, Any] = {"slots": 4, "max_length": 512, "self_check": False} | options
        return steering.Engine(load_mllm(family), **settings)

    return make
