"""Processes that run beside each other end with the one that began them, and quietly."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from probes.reproduce.parallel import beside
from tests.forked import forked
from tests.waiting import PATIENCE, is_alive, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all runs in one process")


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[BaseProcess]:
    """Start a process that runs two tasks of twenty minutes in child processes, while other children wait for work.

    One of the waiting children waits for its first task.
    """

    def run(name: str) -> None:
        (tmp_path / name).write_text(str(os.getpid()))
        time.sleep(10 * PATIENCE if name != "quick" else 0)

    def program() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests were begun behind an &
        try:
            list(beside([["quick", "long", "next"], ["never"]], run, 4))
        except KeyboardInterrupt:
            print("Stopped.", flush=True)

    with forked(program, tmp_path / "said") as process:
        started = [tmp_path / name for name in ("long", "next")]
        wait_for(lambda: all(file.exists() and file.read_text() for file in started), process=process)
        time.sleep(0.5)
        group = process.pid
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_ctrl_c_ends_all_runs_silently_and_starts_no_other(begun: BaseProcess, tmp_path: Path) -> None:
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does: everyone in the group gets it
    begun.join(PATIENCE)
    assert begun.exitcode == 0
    assert (tmp_path / "said").read_text() == "Stopped.\n"
    assert not (tmp_path / "never").exists()


def test_no_child_outlives_a_killed_parent(begun: BaseProcess, tmp_path: Path) -> None:
    processes = {int((tmp_path / name).read_text()) for name in ("quick", "long", "next")}
    assert all(map(is_alive, processes))
    begun.kill()
    wait_for(lambda: not any(map(is_alive, processes)))
