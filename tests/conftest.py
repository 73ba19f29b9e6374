"""Setup that the tests of every room share: one thread, and the folder with the tiny checkpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steering.model import calibration
from tests.server.web.browser import chromium  # noqa: F401 -- a fixture: two browsers in one process cannot be driven

torch.set_num_threads(1)  # the models are small, and tests run beside one another
calibration.FOLDER = os.devnull  # a developer's own thresholds are not for tests
os.environ["HELMSIGHT_COMPILED"] = "false"
"""Servers of the embedded model would each have its steps compiled, which takes minutes. What they have switched on by
default is tested by `tests/server/served`, whose servers take nothing of this process's environment."""


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `tests.families.checkpoint` keeps its checkpoints, built once a session."""
    return tmp_path_factory.getbasetemp() / "checkpoints"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first.

    Begun last, one of them would keep one process busy when the other has nothing left to do.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector leave alone what is imported for tests: looking through it takes a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
