"""Log-probabilities of a given reply, read in the prefill of a prompt that contains it."""

from __future__ import annotations

from typing import ClassVar

import torch

from steering.decoder.hooks import Hook
from steering.devices import to_device
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.spans import REPLY
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk, Reuse, Slots

NAME = "reply"
ROWS = 64
"""The number of tokens whose logits are computed at once, because a vocabulary is wide."""


def reply_logprobs(mllm: MLLM, prompt: Prompt, hidden: torch.Tensor, start: int) -> torch.Tensor:
    """Return log-probabilities (nats), (tokens,) float32, of the reply's tokens that a prompt's chunk predicts.

    hidden: (n, d), normalised, of the tokens start..start+n; each predicts the one after it.
    """
    columns = prompt.layout.columns(REPLY)
    rows = columns - 1 - start
    inside = (rows >= 0) & (rows < len(hidden))
    rows, ids = to_device(rows[inside], hidden.device), to_device(prompt.ids[columns[inside]], hidden.device)
    scores = [torch.zeros(0, device=hidden.device)]
    for part, token in zip(rows.split(ROWS), ids.split(ROWS), strict=True):
        scores.append(mllm.head(hidden[part]).log_softmax(-1).gather(1, token[:, None])[:, 0])
    return torch.cat(scores)


class ReplyRecorder(Slots):
    """Keeps the log-probabilities with their sequence, chunk by chunk."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.REPLY})

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        for row, sequence in enumerate(chunk.sequences):
            if sequence.wants(Signal.REPLY):
                hidden = computed.hidden[row, : chunk.lengths[row]]
                scores = reply_logprobs(self.pool.mllm, sequence.prompt, hidden, chunk.starts[row])
                sequence.captured[NAME] = (*sequence.captured.get(NAME, ()), scores)

    def reuse(self, sequence: Sequence) -> Reuse:
        columns = sequence.prompt.layout.columns(REPLY)
        reads_reply = sequence.wants(Signal.REPLY) and len(columns)
        return Reuse(max(int(columns[0]) - 1, 0) if reads_reply else sequence.prompt.length)

    def take(self, sequence: Sequence) -> torch.Tensor | None:
        """Return the log-probabilities, (tokens of the reply,) float32."""
        scores: tuple[torch.Tensor, ...] | None = sequence.captured.get(NAME)
        return None if scores is None else torch.cat(scores).cpu()
