"""The comparison of served tokens with forced ones, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from server.observe.served import ServedAnswer
from server.observe.tokens import match

FORCED = [(b"a ", -0.1), (b"red", -0.2), (b" ball", -0.3)]
"""The tokens of "a red ball" as they were forced, without the end, which makes them four."""


def served(tokens: list[tuple[bytes, float | None]] | None = None, **more: Any) -> ServedAnswer:
    given = None if tokens is None else tuple(tokens)
    return ServedAnswer("q", 0, {}, **{"text": "a red ball", "finish_reason": "stop", "tokens": given, **more})


@pytest.mark.parametrize("end", [[], [(b"<|im_end|>", -0.01)]], ids=["as OpenAI lists them", "as vLLM lists them"])
def test_the_same_tokens_match_whether_the_end_is_listed_or_not(end: list[tuple[bytes, float]]) -> None:
    found = match(served([(token, logprob - 0.5) for token, logprob in FORCED] + end), "a red ball", FORCED, 4)
    assert (found.ok, found.by, found.served, found.forced, found.unmatched) == (True, "tokens", 3, 3, 0)
    assert found.difference == pytest.approx(0.5)


def test_tokens_of_another_split_are_named_where_they_stand() -> None:
    """The texts "re" and "d" are no forced tokens, and " ball" is one again, since as many bytes are before it."""
    split = [(b"a ", -0.1), (b"re", -9.0), (b"d", -9.0), (b" ball", -0.7)]
    found = match(served(split), "a red ball", FORCED, 4)
    assert (found.ok, found.served, found.unmatched) == (False, 4, 2)
    assert found.named == ((1, "re"), (2, "d"))
    assert found.difference == pytest.approx(0.4), "of tokens that are the same"


def test_the_same_token_elsewhere_is_another() -> None:
    found = match(served([(b"red", -1.0), (b" ball", -1.0)], text="red ball"), "a red ball", FORCED, 4)
    assert (found.text, found.unmatched) == (False, 2)


@pytest.mark.parametrize(
    ("count", "reason", "unmatched"),
    [(4, "stop", 0), (3, "stop", 0), (5, "stop", 1), (2, "stop", 2), (3, "length", 1)],
)
def test_counts_may_leave_out_the_end_of_a_whole_answer(count: int, reason: str, unmatched: int) -> None:
    found = match(served(completion_tokens=count, finish_reason=reason), "a red ball", FORCED, 4)
    assert (found.by, found.unmatched) == ("count", unmatched)


def test_an_answer_whose_tokens_are_unknown_says_so() -> None:
    found = match(served(), "a red ball", FORCED, 4)
    assert (found.by, found.served, found.ok) == (None, None, True)
    assert not match(served(), "a red", FORCED[:2], 3).ok, "its text is known"


def test_forced_numbers_whose_text_is_another_are_told() -> None:
    """Another tokenizer has other texts for the same numbers; a text that the server changed cannot be compared."""
    assert not match(served(token_ids=(1, 2, 3, 4)), "a rod ball", FORCED, 4).ok
    assert match(served(token_ids=(1, 2, 3, 4), changed="reasoning"), "<think>x</think>a red ball", FORCED, 4).ok
