"""How many of the CPU's threads a pass takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steering.model.mllm import MLLM

SMALL = 2**18
"""Elements of the largest weight of a layer below which few tokens are done by one thread as soon as by several, which wait
for each other longer than they compute; others have the processors meanwhile."""
FEW = 64
"""So many tokens."""


class PassThreads:
    """The threads of a model's passes; as many as torch has here, but for small ones."""

    def __init__(self, mllm: MLLM):
        self._most = torch.get_num_threads()
        weights = (one.weight.numel() for layer in mllm.layers for one in layer.modules() if isinstance(one, nn.Linear))
        self._small = mllm.device.type == "cpu" and max(weights, default=SMALL) < SMALL

    def of(self, tokens: int) -> int:
        """How many a pass of so many tokens takes."""
        return 1 if self._small and tokens <= FEW else self._most

    @contextmanager
    def taken(self, tokens: int) -> Iterator[None]:
        """Have torch take as many as such a pass does, in this thread."""
        wanted = self.of(tokens)
        if wanted == self._most:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(self._most)
