"""The hidden states that a readout needs of an answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StateChoice:
    """The states that a request wants: layers, counted from 0 (None for all), and positions.

    positions: the prompt's "last" token, the "generated" ones, or those from the first number up to, not including, the
    second, counted from 0 over the prompt's tokens (image tokens included) and the answer's; the first `most` of them.
    """

    layers: tuple[int, ...] | None = None
    positions: Literal["last", "generated"] | tuple[int, int] = "last"
    most: int = sys.maxsize

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Return the layers of a model with `count`."""
        return tuple(range(count)) if self.layers is None else self.layers

    def columns(self, prompt: int) -> tuple[int, int]:
        """Return the first position, and the end, behind a prompt of so many tokens."""
        if self.positions == "last":
            return prompt - 1, prompt
        first, end = (prompt, sys.maxsize) if self.positions == "generated" else self.positions
        return first, min(end, first + self.most)

    def size(self, layers: int, prompt: int, tokens: int) -> int:
        """Return how many states it may choose, for an answer of up to `tokens` tokens to a prompt of so many."""
        first, end = self.columns(prompt)
        return len(self.layers_of(layers)) * max(min(end, prompt + tokens) - first, 0)
