"""Tokens of a given answer, as the model would have generated them."""

from __future__ import annotations

from steering.errors import RequestError
from steering.model.mllm import MLLM


def forced_tokens(mllm: MLLM, answer: str, ends: bool = True) -> tuple[int, ...]:
    """Return the tokens of an answer, with the one that ends it unless it was cut short.

    Raises RequestError where it holds a special token, which no answer's text does.
    """
    if match := mllm.special_pattern.search(answer):
        raise RequestError(f"A forced answer must not hold special tokens; this one holds {match[0]!r}.", param="force")
    tokens = mllm.tokenizer.encode(answer, add_special_tokens=False)
    return (*tokens, *(() if mllm.end_id is None or not ends else (mllm.end_id,)))
