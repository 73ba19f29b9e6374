"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

PATIENCE = 120.0
"""Seconds that a busy machine may take for what takes a moment on an idle one; only a test that fails waits for so long."""


def wait_for(happened: Callable[[], object], seconds: float = PATIENCE, process: BaseProcess | None = None) -> None:
    """Until that has happened, which the process, if one is given, must live to see."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.is_alive(), "it ended before"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
