"""The compilation of an engine's steps.

On a CPU, other processes compile the steps while the engine serves, and the result is kept for the next start. Until it is
ready, and where a step cannot be compiled, steps run eagerly. On a GPU, decode steps are captured as CUDA graphs at their
first use, the smallest ones at construction.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping

from steering.accel.backend import Backend, Preparation, State, cpu_can_compile, cpu_preparation
from steering.accel.cuda_graphs import DecodeGraphs
from steering.errors import Fault, UnsupportedModel
from steering.model.mllm import MLLM
from steering.model.processing.pixels import picture
from steering.protocol import intervention
from steering.protocol.intervention_spec import Options
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request, Sampling

log = logging.getLogger(__name__)

COPIED = 2**30
"""Maximum bytes of weights for compiling: compiled steps read a reordered copy, long prompts the original weights."""


def compiler() -> tuple[str, str | None]:
    """Return the name of the C++ compiler for steps, and its path; None where it is not installed."""
    name = os.environ.get("CXX", "g++")
    return name, shutil.which(name)


def pays(mllm: MLLM) -> bool:
    """Return True where a model's decode step is worth compiling.

    On a single GPU, a CUDA graph halves the time of a step. On a CPU a compiler is needed, and weights small enough that
    memory for a copy is cheap.
    """
    if mllm.device.type == "cuda":  # rotary angles that depend on lengths need the host at each step
        return len(mllm.devices) == 1 and mllm.ranks.size == 1 and mllm.rotates_alike
    here = mllm.device.type == "cpu" and mllm.source is not None and mllm.ranks.size == 1
    size = sum(parameter.nbytes for parameter in mllm.model.parameters())
    return here and size <= COPIED and compiler()[1] is not None and cpu_can_compile()


def check_compilable(mllm: MLLM) -> None:
    """Raise UnsupportedModel for a model whose decode step cannot be compiled."""
    if len(mllm.devices) > 1:
        raise UnsupportedModel(f"{mllm.name} lies on {len(mllm.devices)} devices: its decode step cannot be compiled.")


class Compilation:
    """The compiled steps of one engine; `steps` is its runner's backend, None where nothing is compiled."""

    def __init__(self, mllm: MLLM, compiled: bool, folder: str | None):
        self._stepping = mllm.stepping
        self.steps: Backend | None = None
        self._ahead: Preparation | None = None
        if compiled and mllm.device.type != "cpu":
            self.steps = DecodeGraphs(mllm)
        elif compiled and (ahead := cpu_preparation(mllm, folder)) is not None:
            self._ahead, self.steps = ahead, ahead.steps

    @property
    def state(self) -> State:
        """The state of compiled steps: in use, in preparation, or off."""
        if self._ahead is not None:
            return self._ahead.state
        return "off" if self.steps is None else "ready"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until everything compiled is in use; return False where it is not."""
        return self.state == "ready" if self._ahead is None else self._ahead.wait(timeout)

    def try_now(self, generate: Callable[[list[Request]], object], slots: int, name: str) -> bool:
        """Run `compiled_now` for steps that are captured at their first use; return False where there are none."""
        if not isinstance(self.steps, DecodeGraphs):
            return False
        compiled_now(generate, slots, name)
        self.steps.prepare(rows for rows in (1, 2, 4, slots) if rows <= slots)
        self.steps.tried = True
        return True

    def prepare_next(self) -> bool:
        """Capture a step that may be needed, while nothing runs; return False where there is none to capture."""
        if not isinstance(self.steps, DecodeGraphs):
            return False
        with self._stepping:
            return self.steps.prepare_next()

    def stop(self) -> None:
        """Stop compiling."""
        if self._ahead is not None:
            self._ahead.stop()

    def stats(self) -> Mapping[str, float]:
        """Return how many compiled steps are in use, and how often one was taken."""
        if self.steps is None:
            return {"compiled_in_use": 0, "compiled_steps": 0}
        return {"compiled_in_use": len(self.steps), "compiled_steps": self.steps.taken}


def compiled_now(generate: Callable[[list[Request]], object], slots: int, name: str) -> None:
    """Answer small requests of the most common kinds, so that their steps are captured.

    The kinds are plain or with an intervention that is `rehearsed`, with captures or without. Raises UnsupportedModel where
    one fails.
    """
    message = {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}]}
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    kinds = [kind for kind, _ in intervention.REGISTRY.values() if kind.rehearsed and issubclass(kind, Options)]
    for interventions in ((), *((kind(),) for kind in kinds)):
        for diagnose in (None, Diagnose()):
            request = Request([message], sampling, interventions, diagnose=diagnose)
            try:
                generate([request] * min(slots, 1 if interventions else 2))
            except Fault as fault:
                raise UnsupportedModel(f"{name}: its decode step cannot be compiled: {fault}") from fault
