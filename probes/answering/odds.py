"""The log-odds of "yes" against "no" at an answer's first token."""

from __future__ import annotations

import math
from collections.abc import Iterable

ALTERNATIVES = 20
"""The number of likeliest tokens to request, the most that OpenAI's protocol allows."""


def log_odds(alternatives: Iterable[tuple[str, float]]) -> float | None:
    """Return log P(yes) - log P(no) of the likeliest first tokens, each with its log-probability in nats.

    Spellings count together. If one of both words is not among them, the least of them bounds it; None if neither is.
    """
    pairs = list(alternatives)
    masses = {word: [value for token, value in pairs if token.strip().lower() == word] for word in ("yes", "no")}
    if not any(masses.values()):
        return None
    least = min(value for _, value in pairs)
    yes, no = (_total(values) if values else least for values in masses.values())
    return yes - no


def _total(values: Iterable[float]) -> float:
    return math.log(sum(map(math.exp, values)))
