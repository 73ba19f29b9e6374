"""Signals: the measurements that recorders capture in a forward pass for interventions and readouts."""

from __future__ import annotations

from enum import Enum, auto


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
    LOGPROBS = auto()
    """The log-probability of each generated token."""


OF_UPDATES = frozenset({Signal.UPDATES, Signal.STREAM, Signal.DIVERGENCE})
"""The signals that are measured with the updates of every layer."""
