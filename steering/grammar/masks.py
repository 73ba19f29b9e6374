"""What grammars leave of logits: tokens that lead nowhere become impossible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from llguidance import LLExecutor

from steering.devices import sent
from steering.grammar.compiled import Matcher

BITS = 32
"""Of a word of a packed mask."""


class Masks:
    """Masks logits of one vocabulary on one device.

    All rows of a step are worked out at once, on the CPU, while a GPU may be busy with the logits themselves, and are copied
    as one bit for each token.
    """

    def __init__(self, vocabulary: int, device: torch.device):
        self._vocabulary = vocabulary
        self._words = -(-vocabulary // BITS)
        self._device = device
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, matchers: Sequence[Matcher | None], logits: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary) with -inf for what a row's grammar does not go on with; rows without one keep every
        bit, and without any the logits come back as they are.
        """
        if not any(matchers):
            return logits
        rows = sent(torch.tensor([row for row, matcher in enumerate(matchers) if matcher]), logits.device)
        possible = self.possible([matcher for matcher in matchers if matcher])
        return logits.index_copy(0, rows, torch.where(possible, logits[rows], -torch.inf))

    def possible(self, matchers: Sequence[Matcher]) -> torch.Tensor:
        """(matchers, vocabulary) bool: the tokens that each may go on with, those that end an answer where it may end."""
        pinned = self._device.type == "cuda"
        packed = torch.empty(len(matchers), self._words, dtype=torch.int32, pin_memory=pinned)
        asked = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(asked, packed.data_ptr(), self._words * BITS // 8, len(matchers))
        octets = packed.to(self._device, non_blocking=True).view(torch.uint8)
        bits = (octets[..., None] >> self._shifts & 1).view(torch.bool)
        return bits.flatten(1)[:, : self._vocabulary]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(torch.get_num_threads())
