"""Bounds of a request's texts, which are checked before anything else is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steering.errors import ContextOverflow, RequestError
from steering.model.mllm import MLLM

LEAST_CHARACTERS = 16
LEAST_PARTS = 1024
USUAL_CHARACTERS = 4
"""Characters per token of ordinary text; a prompt with more is counted before it is laid out."""
PIECE = 32_768
"""The number of characters that are tokenised at a time."""


@dataclass(frozen=True)
class TextBounds:
    """The maximum amount of text in one request.

    `characters` bounds all texts together: as many tokens as the context has, each as long as the vocabulary's longest, so
    that a refused request could not have fitted. `parts` bounds the number of texts by the context's tokens: empty texts
    need no tokens, but time.
    """

    tokens: int
    characters: int
    parts: int

    @classmethod
    def of(cls, mllm: MLLM, max_length: int) -> TextBounds:
        """Return the bounds of a model whose prompt and answer have at most `max_length` tokens."""
        return cls(max_length, max_length * max(mllm.longest_token, LEAST_CHARACTERS), max(max_length, LEAST_PARTS))

    def check(self, texts: Sequence[str]) -> None:
        """Raise RequestError unless these texts are within the bounds."""
        if len(texts) > self.parts:
            raise RequestError(
                f"The messages may hold at most {self.parts} texts; got {len(texts)}.",
                param="messages",
                code="too_many_parts",
            )
        if (characters := sum(map(len, texts))) > self.characters:
            raise RequestError(
                f"This model's maximum context length is {self.tokens} tokens. However, the texts of your messages have "
                f"{characters} characters; at most {self.characters} are taken. Please reduce the length of the messages.",
                param="messages",
                code="context_length_exceeded",
            )


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every text of a chat that is tokenised."""
    contents = [message["content"] for message in messages]
    return [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"])
    ]


def count_ahead(mllm: MLLM, texts: Sequence[str], max_length: int, max_tokens: int | None) -> None:
    """Raise ContextOverflow for texts of twice the context's tokens, as soon as that many are counted.

    Cutting the texts into pieces changes the count by a few tokens a cut; a count nearer to the limit is left to the prompt.
    """
    if sum(map(len, texts)) <= USUAL_CHARACTERS * max_length:
        return
    tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            encoding = mllm.tokenizer.backend_tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)
            tokens += sum(encoding.attention_mask)  # 0 where a processor left padding switched on
            if tokens > 2 * max_length:
                raise ContextOverflow(max_length, tokens + (max_tokens or 1), tokens, at_least=True)
