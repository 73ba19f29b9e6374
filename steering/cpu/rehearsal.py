"""The rehearsal: compiled steps are compared with plain ones before they are used, while the engine serves.

It runs no module of the model, and uses no slot of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from steering.accel.backend import Ran, RunnerState
from steering.cpu.forms.registry import Scope, forms_of
from steering.cpu.packages.package import Package
from steering.cpu.step import Variant
from steering.cpu.steps import CompiledPasses, CompiledSteps, WantedStep
from steering.errors import UnsupportedModel
from steering.form import TensorForm
from steering.model.embedded import Embedded
from steering.model.images import PIXELS, Encode, PictureFeatures, joined
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.sequence import Sequence
from steering.protocol.slots import DecodeBatch, PrefillChunk
from steering.runner.columns import Columns
from steering.runner.runner import Runner
from steering.runner.selfcheck import HALF_TOLERANCE, STEPS, TOLERANCE, checked_prompts, checked_sequence
from steering.vision.geometry import GRID

T = TypeVar("T")
Results = list[tuple[torch.Tensor, ...]]
"""Results by pass: logits (rows, vocabulary), then the slots' contents (decode) or the new keys and values (prefill)."""


class Runs(Protocol):
    """Runs passes under the hooks of a scope."""

    def prompts(self, scope: Scope, chunk: PrefillChunk, inputs: Embedded) -> Ran:
        """Run a chunk of some prompts."""

    def decode(
        self, scope: Scope, batch: DecodeBatch, columns: Columns, tokens: torch.Tensor, rope: torch.Tensor
    ) -> Ran:
        """Decode a token of each row."""


class _Plain:
    """Runs passes eagerly."""

    def __init__(self, runner: Runner):
        self._passes, self._parts = runner.passes, runner.hook_plans.every

    def prompts(self, scope: Scope, chunk: PrefillChunk, inputs: Embedded) -> Ran:
        hooks = {form.name: form.prefill(chunk) for form in forms_of(self._parts, "prefill", scope)}
        return Ran(hooks, self._passes.prompts_under(hooks, chunk, inputs))

    def decode(
        self, scope: Scope, batch: DecodeBatch, columns: Columns, tokens: torch.Tensor, rope: torch.Tensor
    ) -> Ran:
        hooks = {form.name: form.plain(batch) for form in forms_of(self._parts, "decode", scope)}
        return Ran(hooks, self._passes.decode_under(hooks, batch, columns, tokens, rope))


class _Compiled:
    """Runs passes by compiled steps alone: a plain one would run the model's modules, which another thread may be using."""

    def __init__(self, passes: CompiledPasses, axes: int | None):
        self._passes, self._axes = passes, axes

    def prompts(self, scope: Scope, chunk: PrefillChunk, inputs: Embedded) -> Ran:
        return _require(self._passes.prompts_of(scope, chunk, inputs, self._axes))

    def decode(
        self, scope: Scope, batch: DecodeBatch, columns: Columns, tokens: torch.Tensor, rope: torch.Tensor
    ) -> Ran:
        return _require(self._passes.decode_of(scope, batch, tokens, rope, self._axes))


def _require(value: T | None) -> T:
    if value is None:
        raise UnsupportedModel("The compiled step was compiled for other hooks.")
    return value


def _pictures(prompt: Prompt) -> list[Mapping[str, torch.Tensor]]:
    """Return the inputs of a prompt's picture, and those of the picture with two others of its size."""
    if not prompt.pictures:
        return []
    first = prompt.pictures[0]
    flipped = replace(
        first, tensors={name: tensor.flip(0) if name == PIXELS else tensor for name, tensor in first.tensors.items()}
    )
    return [joined([first]), joined([first, flipped, flipped])]


def _features(output: Any, count: int) -> tuple[torch.Tensor, ...]:
    """Return a vision encoder's output for `count` pictures: the whole, then the features of each."""
    parts, pooled = PictureFeatures.separate(output, count), output.pooler_output
    if parts is None:
        raise UnsupportedModel(f"The features of {count} images cannot be separated.")
    features = pooled if isinstance(pooled, torch.Tensor) else torch.cat(tuple(pooled))
    return (features, *(tensor for part in parts for tensor in part.tensors))


class Rehearsal:
    """Two prompts and the results of plain steps on them and after them; create it before anything else runs the model."""

    def __init__(self, mllm: MLLM):
        prompts = checked_prompts(mllm)
        length = (
            2 * max(prompt.length for prompt in prompts) + STEPS
        )  # a second part is padded to the length of another
        # A step that reads all columns needs no special care; as in production there are more slots than rows.
        self._runner = Runner(mllm, len(prompts) + 1, length, max_images=1)
        self._tolerance = HALF_TOLERANCE if mllm.rounds else TOLERANCE
        self._sequences = [checked_sequence(prompt, slot, True) for slot, prompt in enumerate(prompts)]
        self._first: list[int] = []
        self._embedded: list[Embedded] = []
        for sequence in self._sequences:
            self._runner.embed([sequence])
            assert sequence.prefill.embedded is not None
            self._embedded.append(Embedded(sequence.prefill.embedded.embeds, sequence.prefill.embedded.positions))
            logits = self._runner.prefill([sequence], budget=sequence.prompt.length)
            assert logits is not None
            self._first.append(int(self._runner.next_tokens([sequence], logits).tokens[0]))
        self._saved_pool = [tensor.clone() for tensor in self._runner.pool.tensors]
        self._parts = self._runner.hook_plans.every
        self._forms = forms_of(self._parts, "decode", "every")
        self._neutral = [tensor.clone() for tensor in self._state()]
        self._expected: dict[Variant, list[Results]] = {}
        self.pictures = [picture for picture in _pictures(prompts[0]) if mllm.alike(picture) is not None]
        """Inputs of one picture, and of several of its size; none where no step is made for such."""

    @property
    def axes(self) -> int | None:
        """The number of rotary axes."""
        return self._runner.embedder.rope_axes

    def rehearse(self, step: WantedStep) -> None:
        """Run the plain passes that a compiled step will be compared with."""
        self._expected[step.variant] = self._results(
            step.variant, _Plain(self._runner), self._runner.mllm.image_features
        )

    def check(self, steps: CompiledSteps, step: WantedStep, package: Package) -> None:
        """Raise UnsupportedModel where a package's steps differ from the plain ones; use from one thread at a time."""
        sole = CompiledSteps.of(steps, step, package)
        runs = _Compiled(
            sole.on(RunnerState(self._runner.pool, self._parts, self._runner.passes.prompts_under)), self.axes
        )
        results = self._results(step.variant, runs, lambda pictures: _require(sole.features(pictures)))
        for expected, actual in zip(self._expected[step.variant], results, strict=True):
            self._compare(expected, actual)

    def _compare(self, expected: Results, actual: Results) -> None:
        for step, (expected_step, actual_step) in enumerate(zip(expected, actual, strict=True)):
            for a, b in zip(expected_step, actual_step, strict=True):
                expected_form, other_form = TensorForm.of(a), TensorForm.of(b)
                if expected_form != other_form:  # caches mix tensors from before and after the switch to compiled steps
                    raise UnsupportedModel(
                        f"Compiled pass {step} returns {other_form}; the eager one returns {expected_form}."
                    )
                plain, compiled = a.nan_to_num(), b.nan_to_num()
                off = float((plain - compiled).abs().max() / plain.abs().max().clamp(min=1e-6))
                if not off <= self._tolerance:
                    raise UnsupportedModel(
                        f"Compiled pass {step} differs from the eager one by {off:.1e} of its range."
                    )

    @torch.inference_mode()
    def _results(self, variant: Variant, runs: Runs, encode: Encode) -> list[Results]:
        if variant.kind == "pictures":
            return [[_features(encode(pictures), len(pictures[GRID]))] for pictures in self.pictures]
        if variant.kind == "prefill":
            return [self._run_prefills(variant.scope, runs)]
        return [self._run_decodes(rows, variant.scope, runs) for rows in (1, len(self._sequences))]

    def _state(self) -> list[torch.Tensor]:
        """Return all tensors that the slots of a decode hold."""
        parts = [form.slots for form in self._forms]
        return [tensor for part in parts for tensor in vars(part).values() if isinstance(tensor, torch.Tensor)]

    def _copy_state(self) -> list[torch.Tensor]:
        """Return a copy of the slots' tensors, because the next pass writes to them.

        For a model that rounds it leaves out measurements: an update near a threshold may be damped or not.
        """
        exact = not self._runner.mllm.rounds
        return [
            tensor.to(torch.float32, copy=True) for tensor in self._state() if exact or not tensor.is_floating_point()
        ]

    def _set(self, something: bool) -> None:
        """Set every slot tensor to its neutral contents, or with `something` to random contents for every setting."""
        for pooled, saved in zip(self._runner.pool.tensors, self._saved_pool, strict=True):
            pooled.copy_(saved)
        random = torch.Generator().manual_seed(0)
        for tensor, neutral in zip(self._state(), self._neutral, strict=True):
            tensor.copy_(torch.rand(tensor.shape, generator=random) / 2 if something else neutral)
        if something:
            for form in self._forms:
                form.draw()

    def _run_prefills(self, scope: Scope, runs: Runs) -> Results:
        """Run one prompt whole, then both in two parts; the second parts begin at different columns."""
        first, sequences = self._sequences[:1], self._sequences
        length = sequences[0].prompt.length
        parts = (
            (first, [0], [length]),
            (sequences, [0, 0], [length // 2, length // 3]),
            (sequences, [length // 2, length // 3], [length - length // 2, sequences[1].prompt.length - length // 3]),
        )
        return [self._chunk(PrefillChunk(*part, complete=True), scope, runs) for part in parts]

    def _chunk(self, chunk: PrefillChunk, scope: Scope, runs: Runs) -> tuple[torch.Tensor, ...]:
        sequences, starts, lengths = chunk.sequences, chunk.starts, chunk.lengths
        self._set(something=scope != "plain")
        for sequence in sequences:
            sequence.captured = {}
        inputs = Embedded.join(
            [
                embedded.cut(start, start + n)
                for embedded, start, n in zip(self._embedded, starts, lengths, strict=False)
            ]
        )
        for pooled in self._runner.pool.tensors:
            for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                pooled[row, :, start : start + n] = 0
        with self._runner.threads.taken(len(sequences) * chunk.width):
            ran = runs.prompts(scope, chunk, inputs)
        for form in forms_of(self._parts, "prefill", scope):
            form.slots.keep(chunk, ran.hooks[form.name], ran.computed)
        computed = ran.computed
        assert computed.logits is not None
        filled = [
            pooled[row, :, : start + n].flatten()
            for pooled in self._runner.pool.tensors
            for row, (start, n) in enumerate(zip(starts, lengths, strict=True))
        ]
        captured = [
            tensor
            for captured in sequences[0].captured.values()
            for tensor in vars(captured).values()
            if isinstance(tensor, torch.Tensor)
        ]
        states = computed.hidden[0, : lengths[0]]
        return (computed.logits, states, torch.cat(filled), *captured, *self._copy_state())

    def _run_decodes(self, rows: int, scope: Scope, runs: Runs) -> Results:
        runner, results = self._runner, Results()
        sequences = self._sequences[:rows]
        self._set(something=scope != "plain")
        for sequence, first in zip(sequences, self._first, strict=False):
            sequence.tokens = [first]
            runner.token[sequence.slot] = first
            runner.position[sequence.slot] = sequence.prompt.length
        for _ in range(STEPS - 1):
            positions = runner.position[:rows].clone()
            batch, columns = runner.passes.batch(sequences, positions)
            ran = runs.decode(scope, batch, columns, runner.token[:rows], positions + runner.rope_delta[:rows])
            for form in forms_of(self._parts, "decode", scope):
                form.slots.record(batch, ran.hooks[form.name], ran.computed)
            runner.position[:rows] += 1
            assert ran.computed.logits is not None
            results.append((ran.computed.logits, *self._copy_state()))
            self._feed(sequences, ran.computed.logits)
        return results

    def _feed(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Feed each sequence the same tokens every time, whatever its logits are."""
        for sequence in sequences:
            token = (sequence.tokens[-1] * 7 + 1) % logits.shape[1]
            sequence.tokens.append(token)
            self._runner.token[sequence.slot] = token
