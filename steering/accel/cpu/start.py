"""A model's steps, compiled by other processes beside what is served and kept for the next start."""

from __future__ import annotations

import logging

from steering.accel.backend import State
from steering.accel.cpu.compiling import Compiling
from steering.accel.cpu.rehearsal import Rehearsal
from steering.accel.cpu.step import Variant
from steering.accel.cpu.steps import CompiledSteps
from steering.model.mllm import MLLM
from steering.runner.threads import PassThreads

log = logging.getLogger(__name__)

VARIANTS = [Variant("decode"), Variant("prefill"), Variant("pictures")]
VARIANTS += [
    Variant("decode", "usual"),
    Variant("prefill", "usual"),
    Variant("prefill", "every"),
    Variant("decode", "every"),
]
"""The steps that are worth compiling, the most wanted first, but the longest not last: others are made beside it."""


class CompiledAhead:
    """The compiled steps of one model; None where there are none to come."""

    def __init__(self, mllm: MLLM, folder: str | None):
        """Start what compiles them. folder: where they are kept, None for the user's cache, "off" for nowhere."""
        self.steps: CompiledSteps | None = None
        self.compiling: Compiling | None = None
        try:
            rehearsal = Rehearsal(mllm)
            threads = PassThreads(mllm).of(1)
            self.steps = steps = CompiledSteps(mllm, threads, rehearsal.axes)
            wanted = [steps.wanted(one) for one in VARIANTS if one.kind != "pictures" or rehearsal.pictures]
            for one in wanted:
                rehearsal.rehearse(one)
            self.compiling = Compiling(
                mllm, steps, wanted, lambda one, package: rehearsal.check(steps, one, package), threads, folder
            )
        except Exception as error:
            log.warning("steps are not compiled, and run as they are: %s: %s", type(error).__name__, error)

    @property
    def state(self) -> State:
        """Whether compiled steps are in use, or will be."""
        if self.compiling is not None:
            return self.compiling.state
        return "off" if self.steps is None else "failed"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that is compiled is in use, for so many seconds; False where it is not."""
        return self.compiling is not None and self.compiling.wait(timeout)

    def stop(self) -> None:
        """End what is being compiled."""
        if self.compiling is not None:
            self.compiling.stop()
