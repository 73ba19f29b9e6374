"""The seam between the runner and what makes its passes faster: a backend is asked for each pass, and may decline it.

A pass that no backend runs runs eagerly, so that `steering` works without any. CUDA graphs (`cuda_graphs`) and the CPU's
steps that are compiled ahead (`cpu`) are backends.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from steering.accel.traced import Made
from steering.decoder.kv import KVPool
from steering.decoder.prompts import PromptKernel
from steering.model.embedded import Embedded
from steering.model.images import Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots

log = logging.getLogger(__name__)

CPU = "steering.accel.cpu"
State = Literal["off", "compiling", "ready", "failed"]


class Ran(NamedTuple):
    """What a backend computed, and the hooks under which it did, by the names of their slots."""

    hooks: Made
    computed: Computed


class RunnerState(NamedTuple):
    """What a runner's passes work on: its keys and values, and all of its slots in the order in which they act."""

    pool: KVPool
    parts: Sequence[Slots]


class FastPasses(Protocol):
    """The passes of one runner by a backend. Each returns None where it declines."""

    def columns(self, needed: int) -> int:
        """How many columns a decode reads that needs so many."""

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """One token (rows,) of every running sequence, at these rotary positions (rows,) of so many axes, under the hooks
        of all slots that act, at least."""

    def prompts(
        self, chunk: PrefillChunk, concerned: Sequence[Slots], inputs: Embedded, axes: int | None
    ) -> Ran | None:
        """A part of some prompts, of which these are the decoder's inputs. concerned: all slots that have a say in it."""

    def prompt_kernel(self) -> PromptKernel | None:
        """By which attention of prompts is computed that run eagerly."""


class Backend(Protocol):
    """What runs passes otherwise than eagerly. axes: how many axes rotary positions have, where that is known. spare_column:
    whether a slot needs a last column that nobody reads. taken: how many passes were run."""

    axes: int | None
    spare_column: bool
    taken: int

    def __len__(self) -> int:
        """How many recorded steps are in use."""

    def on(self, runner: RunnerState) -> FastPasses:
        """Return the passes of one runner."""

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures of one size, as `MLLM.image_features`; None where it declines."""


class Preparation(Protocol):
    """A backend that others prepare beside what is served."""

    steps: Backend | None

    @property
    def state(self) -> State:
        """How far that has come."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is in use, for so many seconds; False where it is not."""

    def stop(self) -> None:
        """End what is being prepared."""


def cpu_preparation(mllm: MLLM, folder: str | None) -> Preparation | None:
    """Have a model's steps compiled for this CPU and kept in a folder; None where `accel/cpu` is not there."""
    module = _cpu("start")
    if module is None:
        log.warning("steps are not compiled, and run as they are: %s is not there", CPU)
        return None
    made: Preparation = module.CompiledAhead(mllm, folder)
    return made


def cpu_can_compile() -> bool:
    """Return whether there is what compiles steps for this CPU."""
    return _cpu("start") is not None


def _cpu(name: str) -> Any:
    """Return a module of `accel/cpu`, the only place that names it; None where that is not there."""
    try:
        return importlib.import_module(f"{CPU}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(CPU):
            raise
        return None
