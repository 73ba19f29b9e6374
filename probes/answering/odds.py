"""The log-odds of "yes" against "no" at an answer's first token."""

from __future__ import annotations

import math
from collections.abc import Iterable

ALTERNATIVES = 20
"""The number of likeliest tokens to request, the most that OpenAI's protocol allows."""

LEAST = -20.0
"""The least log-probability that is told from impossible; the sum of float32 probabilities is not more exact."""


def log_odds(alternatives: Iterable[tuple[str, float]]) -> float | None:
    """Return log P(yes) - log P(no) of the likeliest first tokens, each with its log-probability in nats.

    Spellings count together. A word that is not among them has at most the least of their probabilities, and at most what
    they leave of 1, which is next to nothing where a contrast made all other tokens impossible; that is taken. None if
    neither word is among them.
    """
    pairs = [(token, value) for token, value in alternatives if value > LEAST]
    masses = {word: [value for token, value in pairs if token.strip().lower() == word] for word in ("yes", "no")}
    if not any(masses.values()):
        return None
    remaining = 1 - sum(math.exp(value) for _, value in pairs)
    least = min(*(value for _, value in pairs), math.log(max(remaining, math.exp(LEAST))))
    yes, no = (_total(values) if values else least for values in masses.values())
    return yes - no


def _total(values: Iterable[float]) -> float:
    return math.log(sum(map(math.exp, values)))
