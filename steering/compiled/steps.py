"""The compiled steps of a model: which there are, and what each depends on."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
import transformers

from steering.compiled.examples import example_hooks, manifest, small
from steering.compiled.package import Package
from steering.compiled.step import Step, constants
from steering.compiled.store import StoredStep
from steering.compiled.tensors import Foreign, Pattern, taken_apart
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool
from steering.model.mllm import MLLM
from steering.protocol.signals import Signal

FORMAT = 1


class WantedStep(NamedTuple):
    """A step that may be compiled: of which signals, under which hooks, with how many axes of rotary positions; `key` says
    all that it depends on, `manifest` how the model's tensors lie, `small` what is in the small ones."""

    signals: frozenset[Signal]
    shape: Pattern
    axes: int | None
    manifest: str
    small: dict[str, list[float]]
    key: str


class CompiledSteps:
    """What a runner asks for its steps. Any thread may `add`, one `run`s. `axes` are those of rotary positions."""

    def __init__(self, mllm: MLLM, threads: int, axes: int | None = None):
        self._mllm, self._threads, self.axes = mllm, threads, axes
        self._ready: dict[tuple[Pattern, int | None], Package] = {}
        self.taken = 0
        """How many steps were run."""

    @classmethod
    def of(cls, steps: CompiledSteps, wanted: WantedStep, package: Package) -> Self:
        """Those of the same model with this package alone."""
        own = cls(steps._mllm, steps._threads, steps.axes)
        own.add(wanted, package)
        return own

    def __len__(self) -> int:
        return len(self._ready)

    def wanted(self, signals: frozenset[Signal]) -> WantedStep:
        """The step of rows that want these signals."""
        shape, _ = taken_apart(example_hooks(self._mllm, signals))
        step = Step(self._mllm, shape, self.axes)
        laid = manifest(step)
        about = {
            "shape": shape.text(),
            "axes": self.axes,
            "manifest": laid,
            "config": {**self._mllm.model.config.to_dict(), "_name_or_path": None},
            "dtype": str(self._mllm.dtype),
            "threads": self._threads,
            **surroundings(),
        }
        return WantedStep(signals, shape, self.axes, laid, small(step), json.dumps(about, sort_keys=True, default=str))

    def load(self, wanted: WantedStep, entry: StoredStep) -> Package:
        """A package of an entry, which is not in use yet; raises what `Package` raises."""
        return Package(entry, wanted.shape, constants(Step(self._mllm, wanted.shape, wanted.axes)))

    def add(self, wanted: WantedStep, package: Package) -> None:
        """Use a package from the next step on."""
        self._ready[wanted.shape, wanted.axes] = package

    def run(
        self,
        hooks: Sequence[Hook],
        axes: int | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `Package`; None where no step for such hooks is ready."""
        if not self._ready:
            return None
        own = list(hooks)
        try:
            shape, given = taken_apart(own)
        except Foreign:
            return None
        package = self._ready.get((shape, axes))
        if package is None:
            return None
        self.taken += 1
        return package(own, given, tokens, positions, rope, columns, pool)


@functools.cache
def surroundings() -> dict[str, str]:
    """What compiled code depends on beside the model: versions, this project's code, the processor."""
    root = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return {
        "format": str(FORMAT),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "python": sys.version,
        "code": code.hexdigest(),
        "processor": f"{platform.machine()} {_features()}",
    }


def _features() -> str:
    """What the processor is able to, which code is compiled for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "vendor_id", "cpu family", "model", "stepping")
    told = {line.split(":")[0].strip(): line for line in reversed(lines) if line.split(":")[0].strip() in names}
    return " ".join(told[name] for name in sorted(told))
