"""Setup that the tests of every room share: one thread, and the folder with the tiny checkpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durations import TABLE, read_table
from tests.server.web.browser import chromium  # noqa: F401 -- a fixture: two browsers in one process cannot be driven

LONG = 3.0
"""CPU seconds of a file that takes long."""
os.environ["HELMSIGHT_COMPILED"] = "false"
"""Servers of the embedded model would each have its steps compiled, which takes minutes. What they have switched on by
default is tested by `tests/server/served`, whose servers take nothing of this process's environment."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # it hands tests out to other processes, and needs not import what they test
    import torch

    from steering.model import calibration
    from steering.runner import room

    torch.set_num_threads(1)  # the models are small, and tests run beside one another
    calibration.FOLDER = os.devnull  # a developer's own thresholds are not for tests
    room.COMMITTED = 2**22  # of 64 slots, which an engine has by default, a test uses three


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `tests.families.checkpoint` keeps its checkpoints, built once a session."""
    return tmp_path_factory.getbasetemp() / "checkpoints"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take long first, the longest before the others, as `tests/DURATIONS.md` has them.

    Begun last, one of them would keep one process busy when the other has nothing left to do. A file that the table does
    not have yet takes long if one of its tests is slow.
    """
    costs = {TABLE.parents[1] / file: cost.seconds for file, cost in read_table(TABLE.read_text()).items()}
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def seconds(path: Path) -> float:
        known = costs.get(path, LONG if path in slow else 0.0)
        return known if known >= LONG else 0.0

    items.sort(key=lambda item: -seconds(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector leave alone what is imported for tests: looking through it takes a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
