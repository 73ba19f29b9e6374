"""How much of the prompts that come in a step takes, so that running answers are not held up."""

from __future__ import annotations

LEAST = 32
"""Prompt tokens of a step, however short the others are: less costs a forward pass and brings nothing forward."""
UNKNOWN = 128
"""Prompt tokens of a step beside running answers while nothing was measured yet."""
_WEIGHT = 0.2
"""Of a new time in the mean; times that are many times as long as the mean, as of a pause of the machine, count less."""
_OUTLIER = 4.0


class Pace:
    """Bounds the prompt tokens of a step that running answers share, so that it takes at most `stall` times as long as one
    without: decode and prefill are a pass each, as long as a decode alone, and the tokens of the prompt come on top.

    `most` tokens are taken where nobody runs. Raises ValueError unless `stall` is above 2.
    """

    def __init__(self, stall: float, most: int):
        if not stall > 2:
            raise ValueError(f"max_stall must be above 2, the passes of a decode and of a prefill; got {stall!r}.")
        self._stall = stall
        self._most = most
        self._decode = 0.0  # seconds of a step that only decodes
        self._token = 0.0  # seconds of a prompt token beyond the pass that it is in

    def step(self, seconds: float, tokens: int, running: bool) -> None:
        """Learn from a step that took in so many prompt tokens, beside running answers or not."""
        if not tokens:
            self._decode = mean(self._decode, seconds)
        elif self._decode and tokens >= LEAST:
            self._token = mean(self._token, max(0.0, seconds - self._decode * (1 + running)) / tokens)

    def budget(self, running: bool) -> int:
        """How many prompt tokens the next step may take in."""
        if not running:
            return self._most
        if not self._token:
            return min(self._most, UNKNOWN)
        fit = int((self._stall - 2) * self._decode / self._token)
        return min(self._most, max(LEAST, fit))


def mean(so_far: float, value: float) -> float:
    """An exponentially weighted mean with one more value in it; 0 is that of none."""
    return so_far + _WEIGHT * (min(value, _OUTLIER * so_far) - so_far) if so_far else value
