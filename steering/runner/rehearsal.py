"""Compiled steps compared with plain ones, before they are used and beside what is served: no module of the model runs, and
no slot is any request's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from steering.compiled.package import Package
from steering.compiled.step import Kind
from steering.compiled.steps import CompiledSteps, WantedStep
from steering.errors import UnsupportedModel
from steering.model.embedded import Embedded
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk
from steering.runner.runner import Runner
from steering.runner.selfcheck import HALF_TOLERANCE, STEPS, TOLERANCE, checked_prompts, checked_sequence

Told = list[tuple[torch.Tensor, ...]]
"""By pass: logits (rows, vocabulary), then, of a decode that captures them, sums over spans (rows, layers, spans), and of a
prefill the keys and values that it left behind."""


class _Sole(CompiledSteps):
    """Steps that are the only ones: a plain one would run the model's modules, which another thread may be at."""

    def decode(self, *args: Any) -> Computed:
        return _there(super().decode(*args))

    def prefill(self, *args: Any) -> Computed:
        return _there(super().prefill(*args))


def _there(computed: Computed | None) -> Computed:
    if computed is None:
        raise UnsupportedModel("The compiled step is of other hooks than it is for.")
    return computed


class Rehearsal:
    """Two prompts that were run, and what plain steps say of and behind them; to be made before anything else runs the
    model."""

    def __init__(self, mllm: MLLM):
        prompts = checked_prompts(mllm)
        length = (
            2 * max(prompt.length for prompt in prompts) + STEPS
        )  # a second part is padded to the length of another
        # A step that reads all columns is like any other, and the slots are more than the rows, as in use.
        self._runner = Runner(mllm, len(prompts) + 1, length, max_images=1)
        self._tolerance = HALF_TOLERANCE if mllm.rounds else TOLERANCE
        self._sequences = [checked_sequence(mllm, prompt, slot, True) for slot, prompt in enumerate(prompts)]
        self._first: list[int] = []
        self._embedded: list[Embedded] = []
        for sequence in self._sequences:
            self._runner.embed([sequence])
            assert sequence.embedded is not None
            self._embedded.append(Embedded(sequence.embedded.embeds, sequence.embedded.positions))
            logits = self._runner.prefill([sequence], budget=sequence.prompt.length)
            assert logits is not None
            self._first.append(int(self._runner.next_tokens([sequence], logits).tokens[0]))
        self._left = [one.clone() for one in self._runner.pool.tensors]
        self._expected: dict[tuple[Kind, frozenset[Signal]], list[Told]] = {}

    @property
    def axes(self) -> int | None:
        """How many axes rotary positions have."""
        return self._runner.embedder.rope_axes

    def rehearse(self, wanted: WantedStep) -> None:
        """Run what a compiled step will be compared with."""
        self._expected[wanted.kind, wanted.signals] = self._said(wanted)

    def check(self, steps: CompiledSteps, wanted: WantedStep, package: Package) -> None:
        """Raise UnsupportedModel where a package's steps are not the plain ones. One thread at a time."""
        self._runner.steps = _Sole.of(steps, wanted, package)
        try:
            for expected, told in zip(self._expected[wanted.kind, wanted.signals], self._said(wanted), strict=True):
                self._compare(expected, told)
        finally:
            self._runner.steps = None

    def _compare(self, expected: Told, told: Told) -> None:
        for step, (one, other) in enumerate(zip(expected, told, strict=True)):
            for a, b in zip(one, other, strict=True):
                off = float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))
                if not off <= self._tolerance:
                    raise UnsupportedModel(f"Compiled, pass {step} is {off:.1e} of its range off.")

    @torch.inference_mode()
    def _said(self, wanted: WantedStep) -> list[Told]:
        for sequence in self._sequences:
            sequence.spec = replace(sequence.spec, signals=wanted.signals)
        for pooled, left in zip(self._runner.pool.tensors, self._left, strict=True):
            pooled.copy_(left)
        if wanted.kind == "prefill":
            return [self._prefilled()]
        return [self._decoded(rows) for rows in (1, len(self._sequences))]

    def _prefilled(self) -> Told:
        """One prompt whole, then both in parts, the second of which begin at different columns."""
        first, both = self._sequences[:1], self._sequences
        length = both[0].prompt.length
        return [
            self._chunk(first, [0], [length]),
            self._chunk(both, [0, 0], [length // 2, length // 3]),
            self._chunk(both, [length // 2, length // 3], [length - length // 2, both[1].prompt.length - length // 3]),
        ]

    def _chunk(self, sequences: list[Sequence], starts: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
        inputs = Embedded.join(
            [one.cut(start, start + n) for one, start, n in zip(self._embedded, starts, lengths, strict=False)]
        )
        for pooled in self._runner.pool.tensors:
            for row, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                pooled[row, :, start : start + n] = 0
        computed = self._runner.run_chunk(PrefillChunk(sequences, starts, lengths, complete=True), inputs)
        assert computed.logits is not None
        filled = [
            pooled[row, :, : start + n].flatten()
            for pooled in self._runner.pool.tensors
            for row, (start, n) in enumerate(zip(starts, lengths, strict=True))
        ]
        return (computed.logits, torch.cat(filled))

    def _decoded(self, rows: int) -> Told:
        runner, told = self._runner, Told()
        sequences = self._sequences[:rows]
        captured = bool(sequences[0].spec.signals)
        for sequence, first in zip(sequences, self._first, strict=False):
            sequence.tokens = [first]
            runner.token[sequence.slot] = first
            runner.position[sequence.slot] = sequence.prompt.length
        recorder = runner.recorders["attention"]
        recorder.sums.zero_()  # type: ignore[attr-defined]
        for _ in range(STEPS - 1):
            logits = runner.decode_logits(sequences)
            sums = recorder.sums[:rows].clone() if captured else None  # type: ignore[attr-defined]
            told.append((logits,) if sums is None else (logits, sums))
            self._feed(sequences, logits)
        return told

    def _feed(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Let each say the same again each time, whatever its logits are."""
        for sequence in sequences:
            token = (sequence.tokens[-1] * 7 + 1) % logits.shape[1]
            sequence.tokens.append(token)
            self._runner.token[sequence.slot] = token
