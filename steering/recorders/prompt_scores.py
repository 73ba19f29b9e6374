"""Log-probabilities of a prompt's own tokens, read in its prefill."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from steering.decoder.hooks import Hook
from steering.devices import to_device
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk, Reuse, Slots

NAME = "prompt_logprobs"
ROWS = 64
"""The number of tokens whose logits are computed at once, because a vocabulary is wide."""


class PromptScores(NamedTuple):
    """The scores of the tokens of a prompt from the second one on, each behind all before it.

    logprobs: (n,) nats. ranks: (n,), 1 for the likeliest token. top_ids, top_logprobs: (n, k), the likeliest tokens.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def prompt_scores(mllm: MLLM, hidden: torch.Tensor, ids: torch.Tensor, top: int) -> list[PromptScores]:
    """Return the scores of tokens that a chunk predicts, in parts of at most `ROWS` tokens.

    hidden: (n, d), normalised, of the tokens before; ids: (n,), the tokens that follow each.
    """
    parts = []
    for rows, tokens in zip(hidden.split(ROWS), ids.split(ROWS), strict=True):
        logprobs = mllm.head(rows).float().log_softmax(-1)
        token_logprobs = logprobs.gather(1, tokens[:, None])
        likeliest = logprobs.topk(top, dim=-1)
        ranks = 1 + (logprobs > token_logprobs).sum(-1)
        parts.append(PromptScores(token_logprobs[:, 0], ranks, likeliest.indices, likeliest.values))
    return parts


class PromptScoresRecorder(Slots):
    """Keeps the scores with their sequence, chunk by chunk."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.PROMPT_LOGPROBS})

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if chunk.replay:
            return
        for row, sequence in enumerate(chunk.sequences):
            top = sequence.spec.sampling.prompt_logprobs
            if not sequence.wants(Signal.PROMPT_LOGPROBS) or top is None:
                continue
            start = chunk.starts[row]
            following = sequence.prompt.ids[start + 1 : start + 1 + chunk.lengths[row]]
            hidden = computed.hidden[row, : len(following)]
            scores = prompt_scores(self.pool.mllm, hidden, to_device(following, hidden.device), top)
            sequence.captured[NAME] = (*sequence.captured.get(NAME, ()), *scores)

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(0 if sequence.wants(Signal.PROMPT_LOGPROBS) else sequence.prompt.length)

    def take(self, sequence: Sequence) -> PromptScores | None:
        """Return the scores of the whole prompt."""
        parts: tuple[PromptScores, ...] | None = sequence.captured.get(NAME)
        return (
            None if parts is None else PromptScores(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))
        )
