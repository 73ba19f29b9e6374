"""Waiting for what another thread or process does, and bounds on what is computed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

PATIENCE = 120.0
"""Seconds that a busy machine may take for what takes a moment on an idle one; only a test that fails waits for so long."""


def wait_for(happened: Callable[[], object], seconds: float = PATIENCE, process: BaseProcess | None = None) -> None:
    """Until that has happened, which the process, if one is given, must live to see."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.is_alive(), "it ended before"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Return whether a process runs; a zombie, whose status nobody has collected yet, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False


@contextmanager
def computing_within(seconds: float) -> Iterator[None]:
    """Fail if the body takes more of the processor's time.

    Garbage is not collected meanwhile, as that takes the longer the more other tests have left.
    """
    gc.disable()
    try:
        began = time.process_time()
        yield
        took = time.process_time() - began
    finally:
        gc.enable()
    assert took < seconds
