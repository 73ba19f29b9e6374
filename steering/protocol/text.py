"""Conversion of generated tokens to text, piece by piece: incomplete characters and possible stop strings are held back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
REPLACEMENT = "\ufffd"
MOST_HELD = 64
"""Maximum number of tokens held back for an incomplete character; more are not a character."""
_BYTE_LEVEL = {char: byte for byte, char in bytes_to_unicode().items()}


Text = tuple[str, tuple[int, ...]]
"""The text of a token and its bytes; the bytes of a token that is part of a character are no text by themselves."""


def texts_of(tokenizer: Any) -> Callable[[int], Text]:
    """Return a cached function from a token to its text.

    The added vocabulary is fetched once, which for Gemma's 6,400 tokens takes 11 ms.
    """
    added = frozenset(tokenizer.added_tokens_decoder)
    byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    @lru_cache(maxsize=100_000)
    def text_of(token: int) -> Text:
        name = tokenizer.convert_ids_to_tokens(token) or ""  # a model's vocabulary may be larger than its tokenizer's
        if (byte := _BYTE_FALLBACK.fullmatch(name)) is not None:
            raw = bytes([int(byte[1], 16)])
        elif byte_level and token not in added:
            raw = b"".join(bytes([_BYTE_LEVEL[char]]) if char in _BYTE_LEVEL else char.encode() for char in name)
        else:
            raw = name.replace("\u2581", " ").encode()
        return raw.decode(errors="replace"), tuple(raw)

    return text_of


class TextStream:
    """The text of one answer: feed tokens; take the text that is certain.

    stop: the stop strings, searched in the text of the tokens after the first `least` ones, as vLLM does with `min_tokens`.
    kept: special tokens that count as text, by id. before: the tokens that it continues, where it is the rest of a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        kept: Mapping[int, str] | None = None,
        before: Sequence[int] = (),
        least: int = 0,
    ):
        self._tokenizer = tokenizer.backend_tokenizer
        self._kept = kept or {}
        self._stop = stop
        self._unsearched = least
        self._context = [*before]  # the tokens of the last piece: what a token says may depend on the one before
        self._context_text = self._decode(self._context) if before else ""
        self._new: list[int] = []
        self._held = ""
        self.text = ""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete."""
        return self.stop_string is not None

    def feed(self, token: int) -> str:
        """Add a token and return the text that can be shown now."""
        searched = self._unsearched <= 0
        self._unsearched -= 1
        if token in self._kept:
            remaining = self._decode([*self._context, *self._new])[len(self._context_text) :]
            self._context, self._new, self._context_text = [], [], ""
            return self._release(remaining + self._kept[token], searched)
        self._new.append(token)
        piece = self._decode([*self._context, *self._new])[len(self._context_text) :]
        if not piece or (piece.endswith(REPLACEMENT) and len(self._new) < MOST_HELD):
            return ""
        self._context, self._new = self._new, []
        self._context_text = self._decode(self._context)
        return self._release(piece, searched)

    def finish(self) -> str:
        """Return the rest of the text: what was held back, and what an incomplete character decodes to."""
        if self.stopped:
            return ""
        remaining = self._decode([*self._context, *self._new])[len(self._context_text) :]
        out = self._release(remaining, self._unsearched < 0)
        out, self.text, self._held = out + self._held, self.text + self._held, ""
        return out

    def _decode(self, tokens: list[int]) -> str:
        return _decoded(self._tokenizer, tuple(tokens))

    def _release(self, piece: str, searched: bool) -> str:
        """Cut at the first complete stop string, if it is searched; hold back the longest end that may become one."""
        if not self._stop:
            self.text += piece
            return piece
        pending = self._held + piece
        matches = [(at, stop) for stop in self._stop if searched and (at := pending.find(stop)) >= 0]
        if matches:
            end, self.stop_string = min(matches, key=lambda place: place[0])
            out, self._held = pending[:end], ""
        else:
            hold = max(
                (
                    n
                    for stop in self._stop
                    for n in range(1, min(len(stop) - 1, len(pending)) + 1)
                    if stop.startswith(pending[-n:])
                ),
                default=0,
            )
            out, self._held = pending[: len(pending) - hold], pending[len(pending) - hold :]
        self.text += out
        return out


@lru_cache(maxsize=2**16)  # a step is short, and what a token says behind another one is asked for again and again
def _decoded(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
