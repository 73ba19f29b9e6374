"""What a forward pass can be asked to leave behind; recorders capture it, interventions and readouts need it."""

from __future__ import annotations

from enum import Enum, auto


class Signal(Enum):
    """One thing that is measured where somebody needs it, and costs nothing where nobody does."""

    __hash__ = object.__hash__  # Enum's own is Python, and every step of decoding asks who wants what

    SPANS = auto()
    """Attention by span of the prompt, over the question's rows and those of generated tokens."""
    LAST = auto()
    """The same, of the prompt's last row alone."""
    ANCHOR = auto()
    """The same, over the last image's rows."""
    DECAY = auto()
    """Shares of vision, system and user text at each generated token."""
    PATCHES = auto()
    """Attention by column, over the rows of `SPANS`."""
    MAP = auto()
    """Attention by column of the row before the first token, mean over the focus layers."""
    IMAGE_STATES = auto()
    """States of image tokens after the last layer."""
    TEXT_STATES = auto()
    """States of the user's text and of the rows that generate, after the last layer."""
    UPDATES = auto()
    """What attention and FFN do to the residual stream, and FFN activations."""
    STREAM = auto()
    """The residual stream after each layer at the rows that generate the answer."""
    PROMPT_STATE = auto()
    """The residual stream after each layer at one of the prompt's tokens, and the distribution of the first token."""
    DIVERGENCE = auto()
    """How far the updates of every prompt token diverge in each layer."""
    REPLY = auto()
    """Log-probabilities of a reply that the prompt ends with."""
    LOGPROBS = auto()
    """The log-probability of each generated token."""


OF_UPDATES = frozenset({Signal.UPDATES, Signal.STREAM, Signal.DIVERGENCE})
"""Those that are measured with the updates of every layer."""
