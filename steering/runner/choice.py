"""The choice of the next token from a pass's logits, under grammars, interventions and each row's sampling settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from steering.devices import to_device
from steering.grammar.masks import Masks
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Slots
from steering.runner.sampler import Needs, Sampled, SamplerRows, sample
from steering.triton.truncation import thresholds_kernel


class Chooser:
    """The sampling settings of every slot, and their application to logits."""

    def __init__(self, mllm: MLLM, slots: int):
        self._ranks = mllm.ranks
        self._masks = Masks(mllm.vocab_size, mllm.device)
        self._rows = SamplerRows(slots, mllm.vocab_size, mllm.stop_ids, mllm.device)
        thresholds_kernel(mllm.device)  # compiled now, not while answers run

    def place(self, sequence: Sequence) -> None:
        """Write a sequence's settings, and its generated tokens, into its slot."""
        generated = torch.tensor(sequence.tokens, dtype=torch.int64)
        spec = sequence.spec
        self._rows.place(sequence.slot, spec.sampling, spec.seed, spec.prompt.ids, generated)

    def move(self, source: int, target: int) -> None:
        """Copy a slot's settings to another slot."""
        self._rows.move(source, target)

    def masked(self, sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (rows, vocabulary) with the tokens that the sequences' grammars forbid masked.

        This happens before any contrast, so that plausibility is among the allowed tokens; the logits of a waiting sequence
        were masked when it began to wait. A sequence that has ended meanwhile has no next token.
        """
        matchers = [None if sequence.held or sequence.finish_reason else sequence.matcher for sequence in sequences]
        return self._masks.apply(matchers, logits)

    def sampled(
        self,
        sequences: list[Sequence],
        acting: Iterable[Slots],
        rows: slice | torch.Tensor,
        positions: Callable[[], torch.Tensor],
        logits: torch.Tensor,
    ) -> Sampled:
        """Sample a token for each row of logits (rows, vocabulary), as its interventions leave them.

        positions: returns (rows,), the positions of these tokens, where some row needs them.
        """
        for part in acting:
            changed = part.logits(sequences, rows, logits)
            if changed.shape != logits.shape:
                raise RuntimeError(f"{part.name} made logits {tuple(changed.shape)} of {tuple(logits.shape)}.")
            logits = changed
        scored = any(sequence.wants(Signal.LOGPROBS) for sequence in sequences)
        needs = Needs.of([sequence.spec.sampling for sequence in sequences], scored=scored)
        sampled = sample(logits, self._rows, rows, positions() if needs.positions else None, needs)
        sampled = sampled.agreed(self._ranks)
        _force(sampled, logits, sequences)
        self._rows.count(rows, sampled.tokens)  # at the end, so that a repeated step samples the same token
        return sampled


def _force(sampled: Sampled, logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Replace sampled tokens with forced ones, where a sequence has any left. logits: (rows, vocabulary)."""
    forced = [
        (row, sequence.spec.forced[len(sequence.tokens)])
        for row, sequence in enumerate(sequences)
        if len(sequence.tokens) < len(sequence.spec.forced)
    ]
    if forced:
        rows, tokens = to_device(torch.tensor(forced), logits.device).unbind(1)
        sampled.tokens[rows] = tokens
        if sampled.logprob is not None:
            sampled.logprob[rows] = logits[rows].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
