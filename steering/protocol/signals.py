"""Signals: the measurements that recorders capture in a forward pass for interventions and readouts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal


class Signal(Enum):
    """A measurement that is taken only where an intervention or a readout needs it."""

    __hash__ = object.__hash__  # Enum's own hash runs in Python, and every decode step looks up who needs which signal

    SPANS = auto()
    """Attention by span of the prompt, over the question's rows and those of generated tokens."""
    LAST = auto()
    """Attention by span, of the prompt's last row alone."""
    ANCHOR = auto()
    """Attention by span, over the last image's rows."""
    DECAY = auto()
    """Shares of vision, system and user text at each generated token."""
    PATCHES = auto()
    """Attention by column, over the rows of `SPANS`."""
    MAP = auto()
    """Attention by column of the row before the first token, mean over the focus layers."""
    IMAGE_STATES = auto()
    """States of image tokens after the last layer."""
    TEXT_STATES = auto()
    """States of the user's text and of the rows that generate the answer, after the last layer."""
    UPDATES = auto()
    """Updates of attention and FFN to the residual stream, and FFN activations."""
    STREAM = auto()
    """The residual stream after each layer at the rows that generate the answer."""
    PROMPT_STATE = auto()
    """The residual stream after each layer at one of the prompt's tokens, and the distribution of the first token."""
    DIVERGENCE = auto()
    """Divergence of the updates of every prompt token in each layer."""
    ACTIVATIONS = auto()
    """The residual stream after chosen layers at chosen positions of prompt and answer."""
    REPLY = auto()
    """Log-probabilities of a reply that the prompt ends with."""
    PROMPT_LOGPROBS = auto()
    """Log-probabilities of the prompt's own tokens."""
    STEPS = auto()
    """The numbers of every step that `StepGauge`s describe, for interventions that follow them."""
    LOGPROBS = auto()
    """The log-probability of each generated token."""


OF_UPDATES = frozenset({Signal.UPDATES, Signal.STREAM, Signal.DIVERGENCE})
"""The signals that are measured with the updates of every layer."""


@dataclass(frozen=True)
class StepGauge:
    """A number that a recorder measures at every step of each sequence that wants `signal`; see `Computed.numbers`.

    It lies from `low` to `high`, and grows where steering pushes toward `rises`. It has no value for prompts without what it
    `needs`, of "image" and "context".
    """

    about: str
    signal: Signal
    low: float
    high: float
    rises: str
    needs: tuple[str, ...] = ()


Positions = Literal["last", "generated"] | tuple[int, int]
"""The prompt's last token, the generated ones, or those from the first number up to, not including, the second."""


@dataclass(frozen=True)
class StateChoice:
    """The states that a request wants: layers, counted from 0 (None for all), and positions.

    positions: the prompt's "last" token, the "generated" ones, or those from the first number up to, not including, the
    second, counted from 0 over the prompt's tokens (image tokens included) and the answer's; the first `most` of them.
    """

    layers: tuple[int, ...] | None = None
    positions: Positions = "last"
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
