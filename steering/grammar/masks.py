"""Masks of logits: tokens that an answer's grammar excludes become impossible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from llguidance import LLExecutor

from steering.devices import to_device
from steering.grammar.compiled import Matcher

BITS = 32
"""The bits of a word of a packed mask."""


class Masks:
    """Masks logits of one vocabulary on one device.

    The masks of all rows of a step are computed at once, on the CPU, while a GPU may be busy with the logits themselves, and
    are copied as one bit for each token.
    """

    def __init__(self, vocabulary: int, device: torch.device):
        self._vocabulary = vocabulary
        self._words = -(-vocabulary // BITS)
        self._device = device
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, matchers: Sequence[Matcher | None], logits: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, vocabulary) with -inf for tokens that a row's grammar excludes.

        Rows without a grammar keep every bit; without any grammar the logits are returned as they are.
        """
        if not any(matchers):
            return logits
        rows = to_device(torch.tensor([row for row, matcher in enumerate(matchers) if matcher]), logits.device)
        possible = self.possible([matcher for matcher in matchers if matcher])
        return logits.index_copy(0, rows, torch.where(possible, logits[rows], -torch.inf))

    def possible(self, matchers: Sequence[Matcher]) -> torch.Tensor:
        """Return the tokens that each matcher allows, (matchers, vocabulary) bool.

        They include the tokens that end an answer where it may end.
        """
        pinned = self._device.type == "cuda"
        packed = torch.empty(len(matchers), self._words, dtype=torch.int32, pin_memory=pinned)
        rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, packed.data_ptr(), self._words * BITS // 8, len(matchers))
        octets = packed.to(self._device, non_blocking=True).view(torch.uint8)
        bits = (octets[..., None] >> self._shifts & 1).view(torch.bool)
        return bits.flatten(1)[:, : self._vocabulary]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(torch.get_num_threads())
