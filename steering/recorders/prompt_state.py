"""Recorder of the residual stream at one of the prompt's tokens, for the probe.

It is no key of the envelope, but the tensors of a `Choice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import to_device
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk, Reuse, Slots

NAME = "prompt_state"


@dataclass
class PromptState:
    """The residual stream at a prompt's token, on the CPU.

    states: (layers, d) float32, after each layer. next_logprobs: (vocabulary,), of the first token, before sampling, in
    nats.
    """

    states: torch.Tensor | None = None
    next_logprobs: torch.Tensor | None = None


class StateRows(LayerHook):
    """Reads the residual stream at one token of each row. at: (rows,). states: (layers, rows, d)."""

    def __init__(self, at: torch.Tensor, states: torch.Tensor):
        self.states = states
        self._at = at
        self._rows = torch.arange(len(at), device=at.device)

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        self.states[layer] = hidden[self._rows.to(hidden.device), self._at.to(hidden.device)]
        return hidden


class PromptStateRecorder(Slots):
    """Keeps the prompt state with its sequence."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.PROMPT_STATE})

    def prefill(self, chunk: PrefillChunk) -> StateRows | None:
        if chunk.replay or not any(sequence.wants(Signal.PROMPT_STATE) for sequence in chunk.sequences):
            return None
        # A chunk of a long prompt may lack the token; prompts that run as a whole each hold their own.
        read = [
            sequence.prompt.length + sequence.spec.state_position - start
            for sequence, start in zip(chunk.sequences, chunk.starts, strict=True)
        ]
        if not all(0 <= at < length for at, length in zip(read, chunk.lengths, strict=True)):
            return None
        mllm = self.pool.mllm
        shape = (mllm.num_layers, len(read), mllm.hidden_size)
        states = torch.zeros(shape, dtype=mllm.dtype, device=mllm.device)
        return StateRows(to_device(torch.tensor(read), mllm.device), states)

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        for row, sequence in enumerate(chunk.sequences):
            if not sequence.wants(Signal.PROMPT_STATE):
                continue
            captured = sequence.captured.setdefault(NAME, PromptState())
            if isinstance(hook, StateRows):
                captured.states = hook.states[:, row].float()
            if computed.logits is not None:
                captured.next_logprobs = computed.logits[row].log_softmax(-1)

    def reuse(self, sequence: Sequence) -> Reuse:
        reads_state = sequence.wants(Signal.PROMPT_STATE)
        return Reuse(sequence.prompt.length + (sequence.spec.state_position if reads_state else 0))

    def take(self, sequence: Sequence) -> PromptState | None:
        captured: PromptState | None = sequence.captured.get(NAME)
        if captured is None:
            return None
        read = (None if tensor is None else tensor.cpu() for tensor in (captured.states, captured.next_logprobs))
        return PromptState(*read)
