"""The compiled steps of a model: which there are, and what each depends on."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
import transformers

from steering.accel.cpu.examples import example_sizes, example_step, manifest, small
from steering.accel.cpu.kernels.native import Loops
from steering.accel.cpu.package import Package
from steering.accel.cpu.packing import PackedWeights, reordered
from steering.accel.cpu.step import STEPS, Kind, Variant, constants
from steering.accel.cpu.store import StoredStep
from steering.accel.tensors import Bound, Pattern, Sizes
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool
from steering.model.images import PIXELS, Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, PrefillChunk, Scope
from steering.team import Team

FORMAT = 5
CODE = ("accel", "decoder", "interventions", "measures.py", "model", "recorders", "tower")
"""Of this package, what a step's computations are written in."""
SOURCES = (".py", ".cpp", ".h")
LONGEST = 512
"""Columns that a compiled prefill reads at most: where there are more, arithmetic is all that takes time, and a plain one
needs no mask. A single prompt may have more, known ones, where its new tokens are as many times fewer."""
SHARED_ROWS = 3
"""Rows of a decode that a thread takes at least where several share it."""
SHARED_TOKENS = 32
"""Tokens of prompts, and patches of pictures, likewise."""
MOST_PATCHES = 1024
"""Patches of pictures that are encoded compiled: of more, arithmetic is all that takes time."""


class WantedStep(NamedTuple):
    """A step that may be compiled: which, under hooks of which shape, whose tensors have which sizes, with how many axes of
    rotary positions; `key` says all that it depends on, `manifest` how the model's tensors lie, `small` what is in the small
    ones."""

    variant: Variant
    shape: Pattern
    sizes: tuple[Sizes, ...]
    axes: int | None
    manifest: str
    small: dict[str, list[float]]
    key: str


class CompiledSteps:
    """What a runner asks for its steps. Any thread may `add`, one `run`s. `threads` are those of one product, `axes`
    those of rotary positions."""

    def __init__(self, mllm: MLLM, threads: int, axes: int | None = None):
        self._mllm, self._threads, self.axes = mllm, threads, axes
        self._team = Team(torch.get_num_threads() if threads == 1 else 1)
        self._ready: dict[tuple[Kind, int | None], list[Package]] = {}
        self._reordered: dict[str, torch.Tensor] = {}  # the same as kernels read them, which all packages share
        self.scopes: dict[str, frozenset[Scope]] = {}
        """What there are steps for, of "prefill" and of "decode"."""
        self.loops: Loops | None = None
        """Those that a prompt's step was linked with, for passes that run as they are."""
        self.taken = 0
        """How many steps were run."""

    @classmethod
    def of(cls, steps: CompiledSteps, wanted: WantedStep, package: Package) -> Self:
        """Those of the same model with this package alone."""
        own = cls(steps._mllm, steps._threads, steps.axes)
        own._team = steps._team  # as many threads as packages were loaded for, whatever torch has been told since
        own.add(wanted, package)
        return own

    @functools.cached_property
    def weights(self) -> PackedWeights:
        """What its steps read."""
        return PackedWeights(self._mllm)

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def wanted(self, variant: Variant) -> WantedStep:
        """The step that is asked for."""
        step, _ = example_step(self._mllm, variant, self.axes, self.weights)
        laid = manifest(step)
        about = {
            "kind": variant.kind,
            "shape": step.shape.text(),
            "axes": self.axes,
            "manifest": laid,
            "config": {**self._mllm.model.config.to_dict(), "_name_or_path": None},
            "dtype": str(self._mllm.dtype),
            "threads": self._threads,
            **surroundings(),
        }
        key = json.dumps(about, sort_keys=True, default=str)
        sizes = example_sizes(self._mllm, variant)
        return WantedStep(variant, step.shape, sizes, self.axes, laid, small(step), key)

    def load(self, wanted: WantedStep, entry: StoredStep) -> Package:
        """A package of an entry, which is not in use yet; raises what `Package` raises."""
        step = STEPS[wanted.variant.kind](self._mllm, wanted.shape, wanted.axes, self.weights)
        if not self._reordered:
            self._reordered = {f"packed.{name}": reordered(one) for name, one in step.packed.named_buffers()}
        return Package(entry, wanted.shape, wanted.sizes, constants(step) | self._reordered, self._team)

    def add(self, wanted: WantedStep, package: Package) -> None:
        """Use a package from the next step on."""
        kind, scope = wanted.variant
        self.scopes = {**self.scopes, kind: self.scopes.get(kind, frozenset()) | {scope}}
        if kind == "prefill" and self._mllm.dtype == torch.float32:
            self.loops = Loops(package.native, self._threads)
        place = kind, wanted.axes
        self._ready = {**self._ready, place: [*self._ready.get(place, ()), package]}

    def decode(
        self,
        hooks: Bound,
        axes: int | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
    ) -> Computed | None:
        """As `Package`; None where no step for such hooks is ready."""
        shares = self._team.shares(len(tokens), SHARED_ROWS)
        found = self._found("decode", hooks, axes)
        if found is None:
            return None
        package, own, given = found
        if not package.divisible:
            shares = [slice(0, len(tokens))]
        return Computed(*package.decode(own, given, tokens, positions, rope, columns, pool, shares))

    def columns(self, needed: int, pool: KVPool) -> int:
        """How many columns a step reads that needs so many."""
        return needed

    def may_run(self, chunk: PrefillChunk, pool: KVPool) -> bool:
        """Whether a part of some prompts is one that compiled steps are for."""
        columns = _columns(chunk)
        short = columns <= LONGEST or (len(chunk.sequences) == 1 and columns * chunk.width <= LONGEST**2)
        return short and columns <= pool.length and pool.layers == self._mllm.num_layers

    def prefill(
        self,
        hooks: Bound,
        axes: int | None,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        chunk: PrefillChunk,
        pool: KVPool,
    ) -> Computed | None:
        """As `Package`, for a chunk that it `may_run`; None where no step for such hooks is ready. embeds: (rows, n, d).
        positions: (rows, n) or (axes, rows, n)."""
        found = self._found("prefill", hooks, axes)
        if found is None:
            return None
        package, own, given = found
        if axes is not None:
            positions = positions.expand(axes, -1, -1)
        slots, starts = torch.arange(chunk.rows.start, chunk.rows.stop), torch.tensor(chunk.starts)
        rows = len(chunk.sequences)
        shares = self._team.shares(rows, -(-SHARED_TOKENS // chunk.width)) if package.divisible else [slice(0, rows)]
        columns = _columns(chunk)
        hidden, logits = package.prefill(
            own, given, embeds, positions, slots, starts, chunk.last, columns, pool, shares
        )
        return Computed(hidden, logits if chunk.complete else None)

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Of pictures of one size, as `MLLM.image_features`; None where no step for them is ready."""
        package = next(iter(self._ready.get(("pictures", self.axes), ())), None)
        if package is None or len(pictures[PIXELS]) > MOST_PATCHES or (given := self._mllm.alike(pictures)) is None:
            return None
        self.taken += 1
        least = -(-SHARED_TOKENS // given[0].shape[1:3].numel())
        return Features((*package.encode(given, self._team.shares(len(given[0]), least)),))

    def _found(
        self, kind: Kind, hooks: Bound, axes: int | None
    ) -> tuple[Package, list[Hook], list[torch.Tensor]] | None:
        """The step that is ready for such hooks, with them and their tensors."""
        for package in self._ready.get((kind, axes), ()):
            if (given := package.given(hooks)) is not None:
                self.taken += 1
                return package, hooks.values, given
        return None


def _columns(chunk: PrefillChunk) -> int:
    """How many columns a compiled prefill reads: padding fills some, too."""
    return max(chunk.starts) + chunk.width


@functools.cache
def surroundings() -> dict[str, str]:
    """What compiled code depends on beside the model: versions, this project's code, the processor."""
    root = Path(__file__).parents[2]
    code = hashlib.sha256()
    for path in sorted(
        path for one in CODE for path in (root / one, *(root / one).rglob("*")) if path.suffix in SOURCES
    ):
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
