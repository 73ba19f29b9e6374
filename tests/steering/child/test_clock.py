"""The time that two processes share is whole, whenever it is read."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from steering.child.clock import StepClock
from tests.forked import forked
from tests.waiting import wait_for

READS = 300_000


def test_no_step_is_found_that_never_was(tmp_path: Path) -> None:
    clock, begun = StepClock(), time.monotonic()

    def steps() -> None:
        while os.getppid() != 1:
            clock.rest()
            clock.step()

    with forked(steps, tmp_path / "said"):
        wait_for(lambda: clock.stepping > -math.inf)
        for _ in range(READS):
            assert clock.stepping <= time.monotonic() - begun
    assert clock.stepping <= time.monotonic() - begun
