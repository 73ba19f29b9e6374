"""The time that two processes share is whole, whenever it is read."""

from __future__ import annotations

import subprocess
import sys

TORN = """
import os, time
from steering.child.clock import StepClock

clock = StepClock()
child = os.fork()
if child == 0:
    while os.getppid() != 1:
        clock.rest()
        clock.step()
until = time.monotonic() + 1.5
seen = set()
while time.monotonic() < until:
    seen.add(clock.stepping > 1)
os.kill(child, 9)
assert seen == {False}, seen
assert clock.stepping < 1 or clock.stepping == float("-inf")
"""


def test_no_step_is_found_that_never_was() -> None:
    subprocess.run([sys.executable, "-c", TORN], check=True, timeout=60)
