"""How an engine's steps come to be compiled.

On a CPU other processes compile them beside what is served, and they are kept for the next start. Until they are ready, and
where they cannot be, steps run as they are. On a GPU decode steps are captured as CUDA graphs at their first use, the
smallest before the engine is there.
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
from steering.model.pixels import picture
from steering.protocol import intervention
from steering.protocol.asked import Options
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request, Sampling

log = logging.getLogger(__name__)

COPIED = 2**30
"""Bytes of weights of which there may be two: compiled steps read a copy in another order, long prompts the weights as they
are."""


def compiler() -> tuple[str, str | None]:
    """The name of the C++ compiler by which steps would be compiled, and where it is, None where it is nowhere."""
    name = os.environ.get("CXX", "g++")
    return name, shutil.which(name)


def pays(mllm: MLLM) -> bool:
    """Whether a model's decode step had better be compiled: on one GPU, where a step as a graph takes half the time; on a
    CPU with a compiler, unless its weights are so large that memory is dear."""
    if mllm.device.type == "cuda":  # where angles follow from lengths, the host looks at these at each step
        return len(mllm.devices) == 1 and mllm.ranks.size == 1 and mllm.rotates_alike
    here = mllm.device.type == "cpu" and mllm.source is not None and mllm.ranks.size == 1
    size = sum(parameter.nbytes for parameter in mllm.model.parameters())
    return here and size <= COPIED and compiler()[1] is not None and cpu_can_compile()


def check_compilable(mllm: MLLM) -> None:
    """Raise UnsupportedModel for a model whose decode step cannot be compiled."""
    if len(mllm.devices) > 1:
        raise UnsupportedModel(f"{mllm.name} lies on {len(mllm.devices)} devices: its decode step cannot be compiled.")


class Compilation:
    """The compiled steps of one engine. `steps` are the backend of its runner, None where there are none to come."""

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
        """Whether compiled steps are in use, or will be."""
        if self._ahead is not None:
            return self._ahead.state
        return "off" if self.steps is None else "ready"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all that is compiled is in use, for so many seconds; False where it is not."""
        return self.state == "ready" if self._ahead is None else self._ahead.wait(timeout)

    def try_now(self, generate: Callable[[list[Request]], object], slots: int, name: str) -> bool:
        """Have steps that are captured at their first use be tried, as `compiled_now`; False where none are."""
        if not isinstance(self.steps, DecodeGraphs):
            return False
        compiled_now(generate, slots, name)
        self.steps.prepare(rows for rows in (1, 2, 4, slots) if rows <= slots)
        self.steps.tried = True
        return True

    def prepare_next(self) -> bool:
        """Capture a step that may be wanted, while nothing runs; False where there is none to capture."""
        if not isinstance(self.steps, DecodeGraphs):
            return False
        with self._stepping:
            return self.steps.prepare_next()

    def stop(self) -> None:
        """End what is being compiled."""
        if self._ahead is not None:
            self._ahead.stop()

    def stats(self) -> Mapping[str, float]:
        """How many compiled steps are in use, and how often one was taken."""
        if self.steps is None:
            return {"compiled_in_use": 0, "compiled_steps": 0}
        return {"compiled_in_use": len(self.steps), "compiled_steps": self.steps.taken}


def compiled_now(generate: Callable[[list[Request]], object], slots: int, name: str) -> None:
    """Answer small requests of the kinds that are asked for most: plain or with an intervention that is `rehearsed`, with
    captures or without. Raises UnsupportedModel where that fails."""
    message = {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}]}
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    kinds = [kind for kind, _ in intervention.REGISTRY.values() if kind.rehearsed and issubclass(kind, Options)]
    for asked in ((), *((kind(),) for kind in kinds)):
        for diagnose in (None, Diagnose()):
            request = Request([message], sampling, asked, diagnose=diagnose)
            try:
                generate([request] * min(slots, 1 if asked else 2))
            except Fault as fault:
                raise UnsupportedModel(f"{name}: its decode step cannot be compiled: {fault}") from fault
