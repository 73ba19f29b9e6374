"""The number of an answer's tokens that are reasoning, between tags of the model's own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


def reasons(text: str, begin: str, prompt_end: str) -> bool:
    """Return whether an answer begins with reasoning: with the first tag, unless the prompt ended with that."""
    return prompt_end.rstrip().endswith(begin) or text.lstrip().startswith(begin)


def reasoning_tokens(tokenizer: Any, tokens: Sequence[int], markers: tuple[str, str], prompt_end: str) -> int:
    """Return how many tokens an answer has up to the tag that ends its reasoning, tags included.

    They are all of its tokens if that tag is missing, and none if it does not reason. A token that holds the end of the tag
    and more counts.
    """

    def text_of(count: int) -> str:
        return str(tokenizer.decode(tokens[:count], skip_special_tokens=True))

    begin, end = markers
    text = text_of(len(tokens))
    if not reasons(text, begin, prompt_end):
        return 0
    if end not in text:
        return len(tokens)
    return bisect_left(range(len(tokens) + 1), True, key=lambda count: end in text_of(count))
