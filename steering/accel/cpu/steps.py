"""The compiled steps of a model: which there are, and what each depends on."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch

from steering.accel.backend import Ran, RunnerState
from steering.accel.cpu.attention import CpuPrompts
from steering.accel.cpu.examples import example_sizes, example_step, manifest, small
from steering.accel.cpu.forms.registry import COMPILED, SCOPES, CompiledForm, Scope, forms_of
from steering.accel.cpu.kernels.native import Loops
from steering.accel.cpu.kernels.prompts import PromptLoops
from steering.accel.cpu.keys import code_digest, surroundings
from steering.accel.cpu.packages.package import Package
from steering.accel.cpu.packages.store import StoredStep
from steering.accel.cpu.packages.team import Team
from steering.accel.cpu.packing import PackedWeights, reordered
from steering.accel.cpu.step import STEPS, Kind, Variant, constants
from steering.accel.tensors import Bound, Pattern, Sizes
from steering.accel.traced import KnownHooks, bound_of
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool
from steering.decoder.prompts import PromptKernel
from steering.model.embedded import Embedded
from steering.model.images import PIXELS, Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots

KINDS: tuple[Kind, ...] = ("decode", "prefill")
"""Those that have hooks."""
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
    """The backend of steps that are compiled ahead. Any thread may `add`, one runs. `threads` are those of one product,
    `axes` those of rotary positions."""

    spare_column = False

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

    def on(self, runner: RunnerState) -> CompiledPasses:
        """Return the passes of one runner."""
        return CompiledPasses(self, runner)

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
            "code": code_digest(),
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


class CompiledPasses:
    """The passes of one runner by compiled steps. Of those that have the hooks of all that acts, the step with fewest
    others runs."""

    def __init__(self, steps: CompiledSteps, runner: RunnerState):
        self._steps, self._pool = steps, runner.pool
        self._forms = {(kind, scope): forms_of(runner.parts, kind, scope) for kind in KINDS for scope in SCOPES}
        self._names = {place: [form.name for form in forms] for place, forms in self._forms.items()}
        self._by_name = {form.name: form for forms in self._forms.values() for form in forms}
        self._hooks = KnownHooks()

    def forms(self, kind: Kind, scope: Scope) -> list[CompiledForm]:
        """Return the forms of the slots whose hooks such steps have."""
        return self._forms.get((kind, scope), [])

    def columns(self, needed: int) -> int:
        """How many columns a decode reads that needs so many."""
        return needed

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """A decode; None where no step that is ready has the hooks of all that acts."""
        needed = [form.decodes if (form := COMPILED.get(type(part))) else None for part in acting]
        for scope in self._scopes("decode", needed):
            if (ran := self.decode_of(scope, batch, tokens, rope, axes)) is not None:
                return ran
        return None

    def decode_of(
        self, scope: Scope, batch: DecodeBatch, tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """The same by the step of a scope."""
        place: tuple[Kind, Scope] = ("decode", scope)
        hooks, bound = self._hooks.of(
            batch, self._names[place], lambda: {form.name: form.decode(batch) for form in self._forms[place]}
        )
        computed = self._steps.decode(bound, axes, tokens, batch.positions, rope, batch.columns, self._pool)
        return None if computed is None else Ran(hooks, computed)

    def prompts(
        self, chunk: PrefillChunk, concerned: Sequence[Slots], inputs: Embedded, axes: int | None
    ) -> Ran | None:
        """A part of some prompts; None likewise, and where it is none that steps are for."""
        if not inputs.plain or not self._steps.may_run(chunk, self._pool):
            return None
        needed: list[Scope | None] = []
        for part in concerned:
            if type(part).prefill is not Slots.prefill and any(map(part.holds, chunk.sequences)):
                form = self._by_name.get(part.name)
                needed.append(None if form is None else form.scope(chunk.sequences))
        for scope in self._scopes("prefill", needed):
            if (chunk.complete or scope == "plain") and (
                ran := self.prompts_of(scope, chunk, inputs, axes)
            ) is not None:
                return ran
        return None

    def prompts_of(self, scope: Scope, chunk: PrefillChunk, inputs: Embedded, axes: int | None) -> Ran | None:
        """The same by the step of a scope."""
        hooks = {form.name: form.prefill(chunk) for form in self._forms["prefill", scope]}
        computed = self._steps.prefill(bound_of(hooks), axes, inputs.embeds, inputs.positions, chunk, self._pool)
        return None if computed is None else Ran(hooks, computed)

    def prompt_kernel(self) -> PromptKernel | None:
        """Our own kernels, of a step that was linked with them, unless torch has more threads than these."""
        loops = self._steps.loops
        if loops is None or loops.threads < torch.get_num_threads():
            return None
        return CpuPrompts(PromptLoops.of(loops))

    def _scopes(self, kind: Kind, needed: Sequence[Scope | None]) -> list[Scope]:
        """The scopes of steps that are ready and have the hooks of all that acts, the smallest first. needed: by each."""
        if None in needed:
            return []
        least = max((SCOPES.index(one) for one in needed if one is not None), default=0)
        ready = self._steps.scopes.get(kind, frozenset())
        return [scope for scope in SCOPES[least:] if scope in ready]
