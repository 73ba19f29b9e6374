"""How likely a model finds a text that it is given: log-probabilities of prompt tokens, read in the prefill."""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.decoder.hooks import Hook
from steering.devices import sent
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.spans import REPLY
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk, Reuse, Slots

NAME = "reply"
ROWS = 64
"""Logits are made for this many tokens at once, because a vocabulary is wide."""


def reply_logprobs(mllm: MLLM, prompt: Prompt, hidden: torch.Tensor, start: int) -> torch.Tensor:
    """(tokens,) float32: the log-probabilities (nats) of the reply's tokens that a chunk of its prompt predicts.

    hidden: (n, d), normalised, of the tokens start..start+n; each predicts the one after it.
    """
    columns = prompt.layout.columns(REPLY)
    rows = columns - 1 - start
    here = (rows >= 0) & (rows < len(hidden))
    rows, ids = sent(rows[here], hidden.device), sent(prompt.ids[columns[here]], hidden.device)
    scores = [torch.zeros(0, device=hidden.device)]
    for some, token in zip(rows.split(ROWS), ids.split(ROWS), strict=True):
        scores.append(mllm.head(hidden[some]).log_softmax(-1).gather(1, token[:, None])[:, 0])
    return torch.cat(scores)


class ReplyRecorder(Slots):
    """Keeps them with the sequence, chunk by chunk."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.REPLY})

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        for row, sequence in enumerate(chunk.sequences):
            if sequence.wants(Signal.REPLY):
                hidden = computed.hidden[row, : chunk.lengths[row]]
                scores = reply_logprobs(self.pool.mllm, sequence.prompt, hidden, chunk.starts[row])
                sequence.captured[NAME] = (*sequence.captured.get(NAME, ()), scores)

    def reuse(self, sequence: Sequence) -> Reuse:
        columns = sequence.prompt.layout.columns(REPLY)
        wanted = sequence.wants(Signal.REPLY) and len(columns)
        return Reuse(max(int(columns[0]) - 1, 0) if wanted else sequence.prompt.length)

    def take(self, sequence: Sequence) -> torch.Tensor | None:
        """(tokens of the reply,) float32."""
        scores: tuple[torch.Tensor, ...] | None = sequence.captured.get(NAME)
        return None if scores is None else torch.cat(scores).cpu()
