"""The log-probabilities of an answer's tokens as numbers, which travel between processes as bytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice


@dataclass(eq=False)
class TopLogprobs:
    """Log-probabilities (nats) of tokens, and the ids and log-probabilities of the likeliest ones beside each.

    chosen: one a token. counts: how many of `ids` and `values`, which are in order, belong to each token.
    """

    chosen: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[tuple[float, list[tuple[int, float]]]]:
        """Yield each token's log-probability, and (id, log-probability) of the likeliest ones, best first."""
        pairs = zip(self.ids, self.values, strict=True)
        return ((logprob, list(islice(pairs, count))) for logprob, count in zip(self.chosen, self.counts, strict=True))

    def append(self, logprob: float, top: Iterable[tuple[int, float]]) -> None:
        """Add a token, with the likeliest ones in its place; a contrast makes some of them impossible."""
        possible = [pair for pair in top if pair[1] > -math.inf]
        self.chosen.append(logprob)
        self.counts.append(len(possible))
        self.ids.extend(token for token, _ in possible)
        self.values.extend(value for _, value in possible)

    def since(self, start: int) -> TopLogprobs:
        """Return those of the tokens from `start` on."""
        before = sum(self.counts[:start])
        return TopLogprobs(self.chosen[start:], self.counts[start:], self.ids[before:], self.values[before:])


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token with its log-probability (nats) and the most likely alternatives, best first."""

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt: its log-probability behind those before it, with the likeliest, and its rank, from 1."""

    scored: TokenLogprob
    rank: int
