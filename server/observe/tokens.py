"""The tokens of an answer that was served, beside those that were forced here: which of them are not the same.

A text may be split into tokens in several ways, and the readouts of another split are those of another answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.observe.served import ServedAnswer

NAMED = 8
"""Most tokens that are named of an answer."""


@dataclass(frozen=True)
class TokenMatch:
    """The comparison of an answer's tokens.

    `by` says what was known of the served ones: their numbers, so that these were forced; their bytes; their count; or
    nothing. `unmatched` counts served tokens that are none of the forced ones, of which `named` holds the first ones with
    their positions. `text` is False if the forced tokens are not the served text.
    """

    by: Literal["numbers", "tokens", "count"] | None
    served: int | None
    forced: int
    unmatched: int
    text: bool = True
    named: tuple[tuple[int, str], ...] = ()
    difference: float | None = None
    """The largest difference between the log-probabilities of matching tokens, which the same weights make small."""

    @property
    def ok(self) -> bool:
        """True if nothing is known to differ."""
        return self.text and not self.unmatched

    def json(self) -> dict[str, Any]:
        """Return the comparison as a row has it."""
        return {
            "by": self.by,
            "served": self.served,
            "forced": self.forced,
            "unmatched": self.unmatched,
            "text": self.text,
            "named": [{"index": index, "token": token} for index, token in self.named],
            "logprob_difference": self.difference,
        }


def match(served: ServedAnswer, text: str, tokens: Sequence[tuple[bytes, float | None]], count: int) -> TokenMatch:
    """Compare a served answer with the forced one: its `text`, its `tokens` without an end, and their `count` with it."""
    same = served.changed is not None or served.text is None or text == served.text
    if served.tokens is None:
        if served.token_ids is not None:
            return TokenMatch("numbers", len(served.token_ids), count, abs(len(served.token_ids) - count), same)
        if served.completion_tokens is not None:
            # Some servers do not count the token that ends an answer.
            ends = served.finish_reason != "length" and served.completion_tokens == count - 1 == len(tokens)
            unmatched = 0 if ends else abs(served.completion_tokens - count)
            return TokenMatch("count", served.completion_tokens, count, unmatched, same)
        return TokenMatch(None, None, count, 0, same)
    theirs = _without_end(served)
    places = {place: logprob for place, (_, logprob) in zip(_places(tokens), tokens, strict=True)}
    missing, differences = [], []
    for index, (place, (token, logprob)) in enumerate(zip(_places(theirs), theirs, strict=True)):
        if place not in places:
            missing.append((index, token.decode(errors="backslashreplace")))
        elif logprob is not None and (ours := places[place]) is not None:
            differences.append(abs(logprob - ours))
    difference = max(differences, default=None)
    by: Literal["numbers", "tokens"] = "tokens" if served.token_ids is None else "numbers"
    return TokenMatch(by, len(theirs), len(tokens), len(missing), same, tuple(missing[:NAMED]), difference)


def _without_end(served: ServedAnswer) -> Sequence[tuple[bytes, float | None]]:
    """Return the served tokens without one that ends the answer, which vLLM lists and others do not."""
    assert served.tokens is not None
    before = b"".join(token for token, _ in served.tokens[:-1])
    ends = served.text is not None and before == served.text.encode("utf-8", "surrogatepass") and served.tokens[-1][0]
    return served.tokens[:-1] if ends else served.tokens


def _places(tokens: Sequence[tuple[bytes, float | None]]) -> list[tuple[int, bytes]]:
    """Return each token with the number of bytes before it, by which tokens of two splits are the same."""
    places, at = [], 0
    for token, _ in tokens:
        places.append((at, token))
        at += len(token)
    return places
