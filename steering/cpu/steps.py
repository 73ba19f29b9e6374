"""The compiled steps of a model, their lookup, and what each depends on."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from steering.accel.backend import Ran, RunnerState
from steering.accel.tensors import Bound, Pattern, Sizes
from steering.accel.traced import KnownHooks, bound_of
from steering.cpu.attention import CpuPrompts
from steering.cpu.examples import example_sizes, example_step, manifest, small
from steering.cpu.forms.registry import COMPILED, SCOPES, CompiledForm, Scope, forms_of
from steering.cpu.kernels.native import Loops
from steering.cpu.kernels.prompts import PromptLoops
from steering.cpu.keys import code_digest, surroundings
from steering.cpu.packages.package import Package
from steering.cpu.packages.store import StoredStep
from steering.cpu.packages.team import Team
from steering.cpu.packing import PackedWeights, reordered
from steering.cpu.step import STEPS, Kind, Variant, constants
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool
from steering.decoder.prompts import PromptKernel
from steering.model.embedded import Embedded
from steering.model.images import PIXELS, Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots

KINDS: tuple[Kind, ...] = ("decode", "prefill")
"""The kinds of steps that have hooks."""
LONGEST = 512
"""Maximum number of columns that a compiled prefill reads.

With more, arithmetic dominates, and a plain prefill needs no mask. A single prompt may have more cached columns, where its
new tokens are fewer in proportion.
"""
SHARED_ROWS = 3
"""Least number of rows of a decode for each thread that shares it."""
SHARED_TOKENS = 32
"""Least number of prompt tokens, or picture patches, for each thread that shares a pass."""
MOST_PATCHES = 1024
"""Maximum number of patches that are encoded compiled: with more, arithmetic dominates."""


class WantedStep(NamedTuple):
    """A step that may be compiled.

    Its variant, the shape of its hooks, the sizes of their tensors, and the number of rotary axes; `key` states everything
    that it depends on, `manifest` the layout of the model's tensors, `small` the contents of the small ones.
    """

    variant: Variant
    shape: Pattern
    sizes: tuple[Sizes, ...]
    axes: int | None
    manifest: str
    small: dict[str, list[float]]
    key: str


class CompiledSteps:
    """The backend of steps that are compiled ahead of time.

    Any thread may `add`; a single thread runs. `threads` is the number of threads of one product, `axes` that of rotary
    axes.
    """

    spare_column = False

    def __init__(self, mllm: MLLM, threads: int, axes: int | None = None):
        self._mllm, self._threads, self.axes = mllm, threads, axes
        self._team = Team(torch.get_num_threads() if threads == 1 else 1)
        self._ready: dict[tuple[Kind, int | None], list[Package]] = {}
        self._reordered: dict[str, torch.Tensor] = {}  # weights in the kernels' order, shared by all packages
        self.scopes: dict[str, frozenset[Scope]] = {}
        """The scopes that have steps, of "prefill" and of "decode"."""
        self.loops: Loops | None = None
        """The loops that a prefill step was linked with, for passes that run eagerly."""
        self.taken = 0
        """The number of steps that were run."""

    @classmethod
    def of(cls, steps: CompiledSteps, step: WantedStep, package: Package) -> Self:
        """Return the steps of the same model with this package alone."""
        steps_of_package = cls(steps._mllm, steps._threads, steps.axes)
        steps_of_package._team = (
            steps._team
        )  # packages were loaded for this number of threads, whatever torch was set to since
        steps_of_package.add(step, package)
        return steps_of_package

    @functools.cached_property
    def weights(self) -> PackedWeights:
        """The packed weights that its steps read."""
        return PackedWeights(self._mllm)

    def on(self, runner: RunnerState) -> CompiledPasses:
        """Return the passes of one runner."""
        return CompiledPasses(self, runner)

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def wanted(self, variant: Variant) -> WantedStep:
        """Return the description of the requested step."""
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
            "code": code_digest(),
            **surroundings(),
        }
        key = json.dumps(about, sort_keys=True, default=str)
        sizes = example_sizes(self._mllm, variant)
        return WantedStep(variant, step.shape, sizes, self.axes, laid, small(step), key)

    def load(self, wanted_step: WantedStep, entry: StoredStep) -> Package:
        """Return the package of an entry, not yet in use; raise what `Package` raises."""
        step = STEPS[wanted_step.variant.kind](self._mllm, wanted_step.shape, wanted_step.axes, self.weights)
        if not self._reordered:
            self._reordered = {f"packed.{name}": reordered(tensor) for name, tensor in step.packed.named_buffers()}
        return Package(entry, wanted_step.shape, wanted_step.sizes, constants(step) | self._reordered, self._team)

    def add(self, step: WantedStep, package: Package) -> None:
        """Use a package from the next step on."""
        kind, scope = step.variant
        self.scopes = {**self.scopes, kind: self.scopes.get(kind, frozenset()) | {scope}}
        if kind == "prefill" and self._mllm.dtype == torch.float32:
            self.loops = Loops(package.native, self._threads)
        place = kind, step.axes
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
        """Decode as `Package.decode`; None where no step for such hooks is ready."""
        shares = self._team.shares(len(tokens), SHARED_ROWS)
        match = self._match_step("decode", hooks, axes)
        if match is None:
            return None
        package, values, tensors = match
        if not package.divisible:
            shares = [slice(0, len(tokens))]
        return Computed(*package.decode(values, tensors, tokens, positions, rope, columns, pool, shares))

    def may_run(self, chunk: PrefillChunk, pool: KVPool) -> bool:
        """Return True where compiled steps are suited to a chunk."""
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
        """Prefill as `Package.prefill`, for a chunk that it `may_run`; None where no step for such hooks is ready.

        embeds: (rows, n, d). positions: (rows, n) or (axes, rows, n).
        """
        match = self._match_step("prefill", hooks, axes)
        if match is None:
            return None
        package, values, tensors = match
        if axes is not None:
            positions = positions.expand(axes, -1, -1)
        slots, starts = torch.arange(chunk.rows.start, chunk.rows.stop), torch.tensor(chunk.starts)
        rows = len(chunk.sequences)
        shares = self._team.shares(rows, -(-SHARED_TOKENS // chunk.width)) if package.divisible else [slice(0, rows)]
        columns = _columns(chunk)
        hidden, logits = package.prefill(
            values, tensors, embeds, positions, slots, starts, chunk.last, columns, pool, shares
        )
        return Computed(hidden, logits if chunk.complete else None)

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures of one size, as `MLLM.image_features`; None where no step for them is ready."""
        package = next(iter(self._ready.get(("pictures", self.axes), ())), None)
        if package is None or len(pictures[PIXELS]) > MOST_PATCHES or (tensors := self._mllm.alike(pictures)) is None:
            return None
        self.taken += 1
        least = -(-SHARED_TOKENS // tensors[0].shape[1:3].numel())
        return Features((*package.encode(tensors, self._team.shares(len(tensors[0]), least)),))

    def _match_step(
        self, kind: Kind, hooks: Bound, axes: int | None
    ) -> tuple[Package, list[Hook], list[torch.Tensor]] | None:
        """Return the step that is ready for such hooks, with the hooks and their tensors."""
        for package in self._ready.get((kind, axes), ()):
            if (tensors := package.given(hooks)) is not None:
                self.taken += 1
                return package, hooks.values, tensors
        return None


def _columns(chunk: PrefillChunk) -> int:
    """Return the number of columns that a compiled prefill reads, padding included."""
    return max(chunk.starts) + chunk.width


class CompiledPasses:
    """The passes of one runner by compiled steps.

    Among the steps with the hooks of all acting slots, the one with the fewest others runs.
    """

    def __init__(self, steps: CompiledSteps, runner: RunnerState):
        self._steps, self._pool = steps, runner.pool
        self._forms = {(kind, scope): forms_of(runner.parts, kind, scope) for kind in KINDS for scope in SCOPES}
        self._names = {place: [form.name for form in forms] for place, forms in self._forms.items()}
        self._by_name = {form.name: form for forms in self._forms.values() for form in forms}
        self._hooks = KnownHooks()

    def forms(self, kind: Kind, scope: Scope) -> list[CompiledForm]:
        """Return the forms of the slots whose hooks such steps have."""
        return self._forms.get((kind, scope), [])

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """Decode; None where no ready step has the hooks of all acting slots."""
        needed = [form.decodes if (form := COMPILED.get(type(part))) else None for part in acting]
        for scope in self._scopes("decode", needed):
            if (ran := self.decode_of(scope, batch, tokens, rope, axes)) is not None:
                return ran
        return None

    def decode_of(
        self, scope: Scope, batch: DecodeBatch, tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """Decode by the step of a scope."""
        place: tuple[Kind, Scope] = ("decode", scope)
        hooks, bound = self._hooks.of(
            batch, self._names[place], lambda: {form.name: form.decode(batch) for form in self._forms[place]}
        )
        computed = self._steps.decode(bound, axes, tokens, batch.positions, rope, batch.columns, self._pool)
        return None if computed is None else Ran(hooks, computed)

    def apart(self, chunk: PrefillChunk, acting: Sequence[Slots]) -> bool:
        """Return False: rows share the weights that a pass reads."""
        return False

    def prompts(self, chunk: PrefillChunk, acting: Sequence[Slots], inputs: Embedded, axes: int | None) -> Ran | None:
        """Run a chunk of some prompts; None where no ready step has its hooks, or it is not suited to compiled steps."""
        if not inputs.plain or not self._steps.may_run(chunk, self._pool):
            return None
        needed: list[Scope | None] = []
        for part in acting:
            if part.may_hook(chunk):
                form = self._by_name.get(part.name)
                needed.append(None if form is None else form.scope(chunk.sequences))
        for scope in self._scopes("prefill", needed):
            if (chunk.complete or scope == "plain") and (
                ran := self.prompts_of(scope, chunk, inputs, axes)
            ) is not None:
                return ran
        return None

    def prompts_of(self, scope: Scope, chunk: PrefillChunk, inputs: Embedded, axes: int | None) -> Ran | None:
        """Run a chunk by the step of a scope."""
        hooks = {form.name: form.prefill(chunk) for form in self._forms["prefill", scope]}
        computed = self._steps.prefill(bound_of(hooks), axes, inputs.embeds, inputs.positions, chunk, self._pool)
        return None if computed is None else Ran(hooks, computed)

    def prompt_kernel(self) -> PromptKernel | None:
        """Return our own kernels, from a step that was linked with them, unless torch uses more threads than they do."""
        loops = self._steps.loops
        if loops is None or loops.threads < torch.get_num_threads():
            return None
        return CpuPrompts(PromptLoops.of(loops))

    def _scopes(self, kind: Kind, needed: Sequence[Scope | None]) -> list[Scope]:
        """Return the scopes of ready steps with all needed hooks, smallest first. needed: the scope of each acting slot."""
        if None in needed:
            return []
        least = max((SCOPES.index(scope) for scope in needed if scope is not None), default=0)
        ready = self._steps.scopes.get(kind, frozenset())
        return [scope for scope in SCOPES[least:] if scope in ready]
