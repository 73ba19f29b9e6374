"""Bounds of a request's texts, which are checked before anything else is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steering.errors import ContextOverflow, RequestError, too_long
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

    def check(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Raise RequestError unless these texts, by field, are within the bounds."""
        if (count := sum(map(len, texts.values()))) > self.parts:
            raise RequestError(
                f"The messages may hold at most {self.parts} texts; got {count}.",
                param="messages",
                code="too_many_parts",
            )
        lengths = {field: sum(map(len, some)) for field, some in texts.items()}
        if (characters := sum(lengths.values())) > self.characters:
            fields = too_long(lengths, self.characters)
            quoted = [f"'{field}'" for field in fields]
            of, reducible = " and ".join(quoted), " or ".join(quoted)
            if fields == ["messages"]:
                of, reducible = "your messages", "the messages"
            raise RequestError(
                f"This model's maximum context length is {self.tokens} tokens. However, the texts of {of} have "
                f"{characters} characters; at most {self.characters} are taken. Please reduce the length of {reducible}.",
                param=fields[0],
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


def count_ahead(mllm: MLLM, texts: Mapping[str, Sequence[str]], max_length: int, max_tokens: int | None) -> None:
    """Raise ContextOverflow for texts of twice the context's tokens, as soon as that many are counted.

    The texts are by field. Cutting them into pieces changes the count by a few tokens a cut; a count nearer to the limit is
    left to the prompt.
    """
    if sum(len(text) for some in texts.values() for text in some) <= USUAL_CHARACTERS * max_length:
        return
    lengths = dict.fromkeys(texts, 0)
    pieces = (
        (field, text[start : start + PIECE])
        for field, some in texts.items()
        for text in some
        for start in range(0, len(text), PIECE)
    )
    for field, piece in pieces:
        encoding = mllm.tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False)
        lengths[field] += sum(encoding.attention_mask)  # 0 where a processor left padding switched on
        if (tokens := sum(lengths.values())) > 2 * max_length:
            raise ContextOverflow(max_length, tokens + (max_tokens or 1), tokens, at_least=True, lengths=lengths)
