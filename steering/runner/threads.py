"""The number of CPU threads of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steering.model.mllm import MLLM

SMALL = 2**18
"""Elements of a layer's largest weight below which one thread is as fast as several for few tokens.

Several threads would wait for each other longer than they compute; meanwhile other work can use the processors.
"""
FEW = 64
"""Number of tokens that count as few."""


class PassThreads:
    """The threads of a model's passes: all that torch has, except for small passes."""

    def __init__(self, mllm: MLLM):
        self._most = torch.get_num_threads()
        weights = (
            module.weight.numel()
            for layer in mllm.layers
            for module in layer.modules()
            if isinstance(module, nn.Linear)
        )
        self._small = mllm.device.type == "cpu" and max(weights, default=SMALL) < SMALL

    def of(self, tokens: int) -> int:
        """Return the number of threads for a pass of `tokens` tokens."""
        return 1 if self._small and tokens <= FEW else self._most

    @contextmanager
    def taken(self, tokens: int) -> Iterator[None]:
        """Let torch use that number of threads, in this thread."""
        threads = self.of(tokens)
        if threads == self._most:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._most)
