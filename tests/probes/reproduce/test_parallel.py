"""Processes that run beside each other end with the one that began them, and quietly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all runs in one process")

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from probes.reproduce.parallel import beside

def run(name):
    Path(sys.argv[1], name).write_text(str(os.getpid()))
    time.sleep(120 if name != "quick" else 0)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where what runs the tests was begun behind an &
try:
    list(beside([["quick", "long", "next"], ["never"]], run, 3))
except KeyboardInterrupt:
    print("Stopped.", flush=True)
"""


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs two things of two minutes in processes of its own, while a third waits for work."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("long", "next")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _lives(process: int) -> bool:
    """A zombie, which nobody has asked for its status yet, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_ends_them_without_a_word_and_nothing_else_begins(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does: everyone in the group gets it
    said, _ = begun.communicate(timeout=20)
    assert said == "Stopped.\n"
    assert not (tmp_path / "never").exists()


def test_none_outlives_the_one_that_was_killed(begun: subprocess.Popen[str], tmp_path: Path) -> None:
    processes = {int((tmp_path / name).read_text()) for name in ("quick", "long", "next")}
    assert all(map(_lives, processes))
    begun.kill()
    deadline = time.monotonic() + 10
    while any(map(_lives, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
