"""The interface between the runner and its backends, which run passes faster; a backend may decline a pass.

A pass that no backend runs runs eagerly, so that `steering` works without any. CUDA graphs (`cuda_graphs`) and the CPU's
steps that are compiled ahead of time (`cpu`) are backends.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from steering.accel.traced import HooksByName
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool
from steering.decoder.prompts import PromptKernel
from steering.model.embedded import Embedded
from steering.model.images import Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots

log = logging.getLogger(__name__)

CPU = "steering.cpu"
State = Literal["off", "compiling", "ready", "failed"]


class Ran(NamedTuple):
    """The results of a backend's pass, and the hooks under which it ran, by the names of their slots."""

    hooks: HooksByName
    computed: Computed


Eager = Callable[[Mapping[str, Hook | None], PrefillChunk, Embedded], Computed]
"""A function that runs a chunk of some prompts eagerly, under hooks by the names of their slots."""


class RunnerState(NamedTuple):
    """The state that a runner's passes work on: its keys and values, and all of its slots in the order in which they act.

    eager: runs prompts without a backend.
    """

    pool: KVPool
    parts: Sequence[Slots]
    eager: Eager


class FastPasses(Protocol):
    """The passes of one runner by a backend. Each returns None where it declines."""

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """Decode one token (rows,) of every running sequence, under at least the hooks of all acting slots.

        rope: rotary positions (rows,), with `axes` axes.
        """

    def apart(self, chunk: PrefillChunk, acting: Sequence[Slots]) -> bool:
        """Return True where the prompts of a chunk, with these slots, run faster one after the other than together."""

    def prompts(self, chunk: PrefillChunk, acting: Sequence[Slots], inputs: Embedded, axes: int | None) -> Ran | None:
        """Run a chunk of some prompts, with these decoder inputs. acting: all slots that take part in the pass."""

    def prompt_kernel(self) -> PromptKernel | None:
        """Return the attention kernel for prompts that run eagerly."""


class Backend(Protocol):
    """Runs passes other than eagerly.

    axes: the number of rotary axes, where that is known. spare_column: True where a slot needs a last column that nothing
    reads. taken: the number of passes that were run.
    """

    axes: int | None
    spare_column: bool
    taken: int

    def __len__(self) -> int:
        """Return how many recorded steps are in use."""

    def on(self, runner: RunnerState) -> FastPasses:
        """Return the passes of one runner."""

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures of one size, as `MLLM.image_features`; None where it declines."""


class Preparation(Protocol):
    """A backend that other processes prepare while the engine serves."""

    steps: Backend | None

    @property
    def state(self) -> State:
        """The state of the preparation."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until everything is in use; return False where it is not."""

    def stop(self) -> None:
        """Stop preparing."""


def cpu_preparation(mllm: MLLM, folder: str | None) -> Preparation | None:
    """Start compiling a model's steps for this CPU, to be kept in a folder; None where `steering.cpu` is missing."""
    module = _cpu("start")
    if module is None:
        log.warning("steps are not compiled and run eagerly: %s is missing", CPU)
        return None
    preparation: Preparation = module.CompiledAhead(mllm, folder)
    return preparation


def cpu_can_compile() -> bool:
    """Return True where the compiler of steps for this CPU is available."""
    return _cpu("start") is not None


def _cpu(name: str) -> Any:
    """Return a module of `steering.cpu`, None where it is missing; nothing else names that package."""
    try:
        return importlib.import_module(f"{CPU}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(CPU):
            raise
        return None
