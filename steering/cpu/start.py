"""The compiled steps of a model: compiled by other processes while the engine serves, and kept for the next start."""

from __future__ import annotations

import logging

from steering.accel.backend import State
from steering.cpu.compiling import Compiling
from steering.cpu.rehearsal import Rehearsal
from steering.cpu.step import Variant
from steering.cpu.steps import CompiledSteps
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
"""The steps worth compiling, most wanted first, but the longest not last, so that others are compiled beside it."""


def variants_of(mllm: MLLM) -> list[Variant]:
    """Return the variants that a model may have.

    A prefill is given embeddings alone, some hooks read updates, and no step knows recurrent states.
    """
    return [
        variant
        for variant in VARIANTS
        if not (variant.kind == "prefill" and mllm.token_inputs.further)
        and (mllm.updates_add_up or variant.scope != "every")
        and (variant.kind == "pictures" or not mllm.recurrent_layers)
    ]


class CompiledAhead:
    """The compiled steps of one model; `steps` is None where they could not be prepared."""

    def __init__(self, mllm: MLLM, folder: str | None):
        """Start compiling. folder: where steps are kept, None for the user's cache, "off" for nowhere."""
        self.steps: CompiledSteps | None = None
        self.compiling: Compiling | None = None
        try:
            rehearsal = Rehearsal(mllm)
            threads = PassThreads(mllm).of(1)
            self.steps = steps = CompiledSteps(mllm, threads, rehearsal.axes)
            requested = [
                steps.wanted(variant)
                for variant in variants_of(mllm)
                if variant.kind != "pictures" or rehearsal.pictures
            ]
            if not requested:
                log.info("all steps run eagerly: none of this model can be compiled")
                self.steps = None
                return
            for step in requested:
                rehearsal.rehearse(step)
            self.compiling = Compiling(
                mllm, steps, requested, lambda step, package: rehearsal.check(steps, step, package), threads, folder
            )
        except Exception as error:
            log.warning("steps are not compiled and run eagerly: %s: %s", type(error).__name__, error)

    @property
    def state(self) -> State:
        """The state of compiled steps: in use, in preparation, failed, or off."""
        if self.compiling is not None:
            return self.compiling.state
        return "off" if self.steps is None else "failed"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until everything compiled is in use; return False where it is not."""
        return self.compiling is not None and self.compiling.wait(timeout)

    def stop(self) -> None:
        """Stop compiling."""
        if self.compiling is not None:
            self.compiling.stop()
