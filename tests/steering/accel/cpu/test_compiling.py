"""A compile process ends with the process that wants it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from steering.accel.cpu.compiling import _kill


def test_what_a_process_started_is_killed_although_that_has_ended() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, process_group=0)
    with process:
        assert process.stdout is not None
        other = Path("/proc", process.stdout.readline().strip())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as nobody has asked yet what it ended with
        assert other.exists()
        _kill(process)
    for _ in range(100):
        if not other.exists() or " Z " in (other / "stat").read_text():
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it goes on")
