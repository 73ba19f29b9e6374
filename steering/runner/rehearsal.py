"""Compiled steps compared with plain ones, before they are used and beside what is served: no module of the model runs, and
no slot is any request's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from steering.compiled.package import Package
from steering.compiled.steps import CompiledSteps, WantedStep
from steering.errors import UnsupportedModel
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.recorders.attention import DECODED
from steering.runner.runner import Runner
from steering.runner.selfcheck import HALF_TOLERANCE, STEPS, TOLERANCE, checked_prompts, checked_sequence

KINDS = (frozenset[Signal](), frozenset(DECODED))
"""What rows may want that the steps in question are for."""
Told = list[tuple[torch.Tensor, ...]]
"""By step: logits (rows, vocabulary), then, where they are captured, sums over spans (rows, layers, spans)."""


class _Sole(CompiledSteps):
    """A step that is the only way: a plain one would run the model's modules, which another thread may be at."""

    def run(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().run(*args)
        if found is None:
            raise UnsupportedModel("The compiled step is of other hooks than it is for.")
        return found


class Rehearsal:
    """Two prompts that were run, and what plain steps say behind them; to be made before anything else runs the model."""

    def __init__(self, mllm: MLLM):
        prompts = checked_prompts(mllm)
        length = max(prompt.length for prompt in prompts) + STEPS
        # A step that reads all columns is like any other, and the slots are more than the rows, as in use.
        self._runner = Runner(mllm, len(prompts) + 1, length, max_images=1)
        self._tolerance = HALF_TOLERANCE if mllm.rounds else TOLERANCE
        self._sequences = [checked_sequence(mllm, prompt, slot, True) for slot, prompt in enumerate(prompts)]
        self._first: list[int] = []
        for sequence in self._sequences:
            logits = self._runner.prefill([sequence], budget=sequence.prompt.length)
            assert logits is not None
            self._first.append(int(self._runner.next_tokens([sequence], logits).tokens[0]))
        self._expected = {(kind, rows): self._said(kind, rows) for kind in KINDS for rows in (1, len(prompts))}

    @property
    def axes(self) -> int | None:
        """How many axes rotary positions have."""
        return self._runner.embedder.rope_axes

    def check(self, steps: CompiledSteps, wanted: WantedStep, package: Package) -> None:
        """Raise UnsupportedModel where a package's steps are not the plain ones. One thread at a time."""
        self._runner.steps = _Sole.of(steps, wanted, package)
        try:
            for (kind, rows), expected in self._expected.items():
                if kind == wanted.signals:
                    self._compare(expected, self._said(kind, rows))
        finally:
            self._runner.steps = None

    def _compare(self, expected: Told, told: Told) -> None:
        for step, (one, other) in enumerate(zip(expected, told, strict=True)):
            for a, b in zip(one, other, strict=True):
                off = float((a - b).abs().max() / a.abs().max().clamp(min=1e-6))
                if not off <= self._tolerance:
                    raise UnsupportedModel(f"Compiled, step {step} is {off:.1e} of its range off.")

    @torch.inference_mode()
    def _said(self, kind: frozenset[Signal], rows: int) -> Told:
        runner, told = self._runner, Told()
        sequences = self._sequences[:rows]
        for sequence, first in zip(sequences, self._first, strict=False):
            sequence.spec = replace(sequence.spec, signals=kind)
            sequence.tokens = [first]
            runner.token[sequence.slot] = first
            runner.position[sequence.slot] = sequence.prompt.length
        recorder = runner.recorders["attention"]
        recorder.sums.zero_()  # type: ignore[attr-defined]
        for _ in range(STEPS - 1):
            logits = runner.decode_logits(sequences)
            sums = recorder.sums[:rows].clone() if kind else None  # type: ignore[attr-defined]
            told.append((logits,) if sums is None else (logits, sums))
            self._feed(sequences, logits)
        return told

    def _feed(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Let each say the same again each time, whatever its logits are."""
        for sequence in sequences:
            token = (sequence.tokens[-1] * 7 + 1) % logits.shape[1]
            sequence.tokens.append(token)
            self._runner.token[sequence.slot] = token
