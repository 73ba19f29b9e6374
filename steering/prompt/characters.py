"""The mapping from characters of a rendered chat to its tokens, once image placeholders are expanded."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.spans import OTHER, TEXTS

JOINER = "\U0010fffd"
"""A private-use character put into special tokens that a user wrote, so that they stay text; removed after tokenising."""
MARK = "\ue000", "\ue001"
"""Characters around the numbers that stand for texts where a chat is rendered without them."""
NOBODY = -1
"""The number of characters that belong to none of `TEXTS`."""


def as_text(text: str, special: re.Pattern[str]) -> str:
    """Return a text with its special tokens made ordinary text."""
    return special.sub(lambda match: match[0][0] + JOINER + match[0][1:], text.replace(JOINER, ""))


def as_json(value: Any, special: re.Pattern[str]) -> Any:
    """Return JSON's lists and objects with special tokens in their texts made ordinary, and our own marks removed."""
    if isinstance(value, str):
        return as_text(value.replace(MARK[0], "").replace(MARK[1], ""), special)
    if isinstance(value, Mapping):
        return {as_json(key, special): as_json(item, special) for key, item in value.items()}
    return [as_json(item, special) for item in value] if isinstance(value, Sequence) else value


class CharSpans:
    """Span numbers of the characters of the expanded text, in which every image placeholder became its tokens.

    Characters of a message's text also have the message's role.
    """

    def __init__(self, text: str, replacements: Sequence[Mapping[str, Any]]):
        self._ends = [r["span"][1] for r in replacements]
        self._gains = [0, *(r["new_span"][1] - r["span"][1] for r in replacements)]
        starts = [r["span"][0] for r in replacements]
        between = [text[a:b] for a, b in zip([0, *self._ends], [*starts, len(text)], strict=True)]
        self.text = "".join(
            piece
            for pair in zip(between, [*(r["replacement"] for r in replacements), ""], strict=True)
            for piece in pair
        )
        self._spans = torch.full((len(self.text),), OTHER)
        self._roles = torch.full((len(self.text),), NOBODY, dtype=torch.int8)
        self._written = torch.zeros(len(self.text) + 1, dtype=torch.int64)
        self._joiners = [self._expanded(match.start()) for match in re.finditer(JOINER, text)]

    def _expanded(self, char: int) -> int:
        """Return the place of a character of the rendered text after the placeholders were expanded."""
        return char + self._gains[bisect_right(self._ends, char)]

    def mark(self, start: int, end: int, span: int, role: str) -> None:
        first = self._expanded(start)
        self._spans[first : first + end - start] = span
        self._roles[first : first + end - start] = TEXTS.index(role) if role in TEXTS else NOBODY
        self._written[first + 1 : first + 1 + end - start] = 1

    def without_joiners(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return (tokens,) bool, False for the tokens that spell a joiner.

        Raises RequestError when a joiner shares a token with other text.
        """
        if not self._joiners:
            return torch.ones(len(offsets), dtype=torch.bool)
        marks = torch.zeros(len(self.text) + 1, dtype=torch.int64)
        marks[torch.tensor(self._joiners, dtype=torch.int64) + 1] = 1
        before = marks.cumsum(0)
        first, last = offsets.clamp(max=len(self.text)).unbind(1)
        touching = before[last] > before[first]
        alone = touching & (last - first == 1)
        spelt = torch.zeros(len(self.text) + 1, dtype=torch.int64)
        spelt[first[alone] + 1] = 1
        if not torch.equal(touching, alone) or not torch.equal(spelt, marks):
            raise RequestError("A special token written in a text cannot be kept as text here.", param="messages")
        return ~alone

    def written(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return whether each token covers any character of a message's texts, (tokens,) bool."""
        before = self._written.cumsum(0)
        first, last = offsets.clamp(max=len(self.text)).unbind(1)
        return before[last] > before[first]

    def of_tokens(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's span (tokens,), that of its last character that is no white space, and its `TEXTS`.

        The latter are (tokens, 2) bool: of a system message's text, of a user message's text. White space does not count,
        because a full stop and a line break may be one token at the end of a span's line. A token without characters belongs
        to no span.
        """
        written = torch.tensor(
            [len(self.text[start:end].rstrip()) for start, end in offsets.tolist()], dtype=torch.int64
        )
        ends = torch.where(written > 0, offsets[:, 0] + written, offsets[:, 1])
        last, shown = (ends - 1).clamp(0, max(len(self.text) - 1, 0)), offsets[:, 1] > offsets[:, 0]
        texts = (self._roles[last, None] == torch.arange(len(TEXTS))) & shown[:, None]
        return torch.where(shown, self._spans[last], OTHER), texts


def without_insertions(mllm: MLLM, ids: torch.Tensor, offsets: torch.Tensor, text: str) -> torch.Tensor:
    """Return token offsets (tokens, 2) into `text`, without the special tokens that a processor inserted.

    Some processors write special tokens into the text before tokenising (PaliGemma puts its bos after the images); an
    inserted token becomes empty.
    """
    if not len(offsets) or int(offsets.max()) <= len(text):
        return offsets
    offsets = offsets.clone()
    special = torch.tensor(sorted(set(mllm.tokenizer.all_special_ids) - {mllm.image_token_id}))
    for token in torch.isin(ids, special).nonzero()[:, 0].tolist():
        start, end = offsets[token].tolist()
        if start < end and text[start:end] != mllm.tokenizer.convert_ids_to_tokens(int(ids[token])):
            offsets[token:] -= end - start
            offsets[token, 1] = offsets[token, 0] = start
    return offsets
